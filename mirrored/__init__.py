"""The per-rank API: each rank holds its own tensors and moves them by explicit collective calls.

Read ``comm.py`` first (the interface of a transport, the object that moves tensors between ranks),
then ``collectives.py`` (the collectives, with drawings), then ``mirrored_tensor.py`` (a list with
one element on each device).
"""

from .collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from .comm import Handle, Ranks, Transport
from .data_parallel import DataParallel
from .mirrored_tensor import MirroredTensor, from_local, scatter
from .reduction import ordered_reduce
from .transports.counting import Call, Counting, counting
from .transports.default import current, use

__all__ = [
    "Call",
    "Counting",
    "DataParallel",
    "Handle",
    "MirroredTensor",
    "Ranks",
    "Transport",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "counting",
    "current",
    "from_local",
    "ordered_reduce",
    "reduce_scatter",
    "scatter",
    "use",
]
