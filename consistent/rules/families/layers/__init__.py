"""Rules of ops that are a layer of a network."""

from . import (
    attention,
    convolution,
    ctc,
    embedding_bag,
    flex_attention,
    normalization,
    packed_attention,
    recurrent,
)

__all__ = [
    "attention",
    "convolution",
    "ctc",
    "embedding_bag",
    "flex_attention",
    "normalization",
    "packed_attention",
    "recurrent",
]
