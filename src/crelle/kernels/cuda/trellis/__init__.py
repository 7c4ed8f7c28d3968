"""Trellis codes on a GPU."""
