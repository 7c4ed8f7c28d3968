"""Four-bit floats (MXFP4, NVFP4) on a GPU."""
