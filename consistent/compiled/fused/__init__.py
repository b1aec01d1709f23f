"""Fused communication: a message combined in one native call with the matrix product before it, or
with the ops after it."""
