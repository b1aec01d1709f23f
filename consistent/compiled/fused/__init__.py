"""Fused communication: a message combined in one native call with the matmul before it, or with the
ops after it."""
