"""Forms of ops that are a layer of a network."""

from . import attention, ctc, embedding, embedding_bag, normalization

__all__ = ["attention", "ctc", "embedding", "embedding_bag", "normalization"]
