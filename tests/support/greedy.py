"""Prompts whose greedy tokens are compared between `crelle generate`, transformers and vLLM."""

TEXTS = ["Once upon a time", "The little dog", "One day, a girl named Lily", "The sun was", "Tom had a red ball"]
IDS = [[1, 5, 9, 200, 33], [1, 77, 12], [1, 100, 101, 102, 103, 250, 7], [1, 3], [1, 40, 41]]  # for random models
TOKENS = 32
