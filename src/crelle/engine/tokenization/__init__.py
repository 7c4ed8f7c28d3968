"""Text to tokens and back: tokenizers and chat templates of untrusted models."""
