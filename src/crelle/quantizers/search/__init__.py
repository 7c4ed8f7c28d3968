"""Mixed precision: the loss's sensitivity to each matrix, and the bits that follow from it."""
