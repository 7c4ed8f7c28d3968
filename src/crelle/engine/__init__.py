"""Floor 5: from prompts to text."""
