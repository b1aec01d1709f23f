"""Ops that are a layer of a network."""

from . import attention, convolution, ctc, embedding_bag, normalization, recurrent

__all__ = ["attention", "convolution", "ctc", "embedding_bag", "normalization", "recurrent"]
