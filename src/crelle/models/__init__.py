"""Floor 4: plain transformer code, one page a family, over QuantLinear."""
