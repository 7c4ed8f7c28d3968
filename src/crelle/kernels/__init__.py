"""Layer 2, kernels: products with quantized matrices. `ops` is the interface; `select` chooses the kernel."""
