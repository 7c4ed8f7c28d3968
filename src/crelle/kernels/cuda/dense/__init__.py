"""Plain 16-bit weights on a GPU."""
