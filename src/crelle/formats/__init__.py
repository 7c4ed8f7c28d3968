"""Layer 1, formats: encodings of weights and caches, each defined in exactly one module; torch only."""
