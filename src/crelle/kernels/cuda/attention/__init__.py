"""Attention over pages on a GPU."""
