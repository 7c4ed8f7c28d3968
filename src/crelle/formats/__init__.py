"""Floor 1: what the bits mean. Each format is defined in exactly one module here; torch only."""
