"""Readers of other projects' files."""
