"""Ranks are processes joined by torch.distributed; messages go by TCP and NCCL."""

from .transport import TorchDist

__all__ = ["TorchDist"]
