"""Formats around another format: permuted inputs, rotated inputs."""
