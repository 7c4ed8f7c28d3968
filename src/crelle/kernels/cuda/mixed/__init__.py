"""Mixed 2/4-bit weights on a GPU."""
