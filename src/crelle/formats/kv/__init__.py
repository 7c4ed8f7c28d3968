"""Formats of the KV cache."""
