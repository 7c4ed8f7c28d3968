"""Speculative decoding: tokens are guessed, and one step of the model verifies several of them."""
