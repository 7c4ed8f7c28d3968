"""Bit-plane weights on a GPU: GEMV on the binary tensor cores, skinny GEMM, GEMM."""
