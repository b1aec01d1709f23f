"""Gradients of global tensors: the dual SBP, and the sums over ranks that leaves need."""
