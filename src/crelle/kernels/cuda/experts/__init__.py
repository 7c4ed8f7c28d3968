"""Mixtures of experts in a decoder's step: routing, and products that read only the chosen experts."""
