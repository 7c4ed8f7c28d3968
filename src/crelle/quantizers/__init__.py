"""Floor 3: which bits to choose. A quantizer is a frozen config whose `fit(weight)` returns a QuantTensor."""
