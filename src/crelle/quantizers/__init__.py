"""Layer 3, quantizers. A quantizer is a frozen config whose `fit(weight)` returns a QuantTensor."""
