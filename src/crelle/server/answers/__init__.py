"""Answers with a form: JSON, tool calls, reasoning; how they are asked for, kept to, and found in a text."""
