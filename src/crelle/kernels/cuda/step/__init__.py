"""A decoder's step on a GPU: linears fused with what surrounds them, CUDA graphs."""
