"""Crelle inside other tools: transformers, vLLM, lm-eval. Each module imports its tool when it is used, not before."""
