"""Speed: kernels, decoding, serving, traces, energy, external programs. Results are checked before they are timed."""
