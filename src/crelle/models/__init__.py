"""Layer 4, models: specs of the families, one torch forward for all of them, the loader."""
