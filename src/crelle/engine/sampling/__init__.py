"""From logits to a token and its text: samplers, penalties, grammars, stop strings."""
