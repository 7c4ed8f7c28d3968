"""Quality: perplexity, accuracy of the kernels, reports; measured on the very object that generates."""
