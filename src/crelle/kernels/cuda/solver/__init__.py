"""Loops of quantizers on a GPU."""
