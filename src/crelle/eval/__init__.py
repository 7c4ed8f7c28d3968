"""Floor 6: how good a model is, measured on the very object that generates."""
