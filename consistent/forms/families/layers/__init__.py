"""Forms of ops that are a layer of a network."""

from . import (
    attention,
    ctc,
    embedding,
    embedding_bag,
    embedding_rows,
    flex_attention,
    normalization,
    packed_attention,
    ring_attention,
)

__all__ = [
    "attention",
    "ctc",
    "embedding",
    "embedding_bag",
    "embedding_rows",
    "flex_attention",
    "normalization",
    "packed_attention",
    "ring_attention",
]
