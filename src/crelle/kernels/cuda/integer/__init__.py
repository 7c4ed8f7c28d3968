"""Integer weights and activations on a GPU (Atom, two-level)."""
