"""Transport between processes of torch.distributed; messages go by TCP and NCCL."""

from .transport import TorchDist

__all__ = ["TorchDist"]
