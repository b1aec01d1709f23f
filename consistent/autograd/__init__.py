"""Gradients of global tensors: their layouts in backward, and the sums over ranks for leaves."""
