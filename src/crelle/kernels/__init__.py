"""Floor 2: how to multiply by a quantized matrix. `ops` is the only door; `select` decides who does the work."""
