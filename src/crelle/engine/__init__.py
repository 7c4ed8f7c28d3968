"""Layer 5, the engine: tokenizer, scheduling, paged cache, sampling."""
