"""Training of quantized weights: block by block, end to end, finetuning."""
