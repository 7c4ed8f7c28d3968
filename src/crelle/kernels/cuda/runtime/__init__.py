"""What kernels share besides jit.py and launch.py: launch plans, an early context, its errors, all variants."""
