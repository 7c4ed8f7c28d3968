"""The papers' table look-up kernel (nuQmm, LUT-GEMM), selected by name only."""
