"""Quality: perplexity, divergence, tasks, accuracy of the kernels, reports; of the very object that generates."""
