"""Calibration: token sequences through the model layer by layer, and the statistics of its linears."""
