"""Execution of a program's segments by CUDA graphs, which are captured once and then replayed.

```
cut.py        splits a segment into stretches of device ops, and what runs between them
replayed.py   inputs at fixed addresses, capture after a warm-up, replay, recapture
cuda.py       capture on CUDA
```
"""

from typing import Any

from .cuda import CudaGraphs
from .replayed import replaying_backend

capturer: type[CudaGraphs] | Any = CudaGraphs  # tests replace it by one that needs no GPU

__all__ = ["capturer", "replaying_backend"]
