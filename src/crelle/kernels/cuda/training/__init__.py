"""Kernels of training on a GPU."""
