"""Layer 6, the job: a model on disk becomes a quantized one, with its data, its plan, its cost and its processes."""
