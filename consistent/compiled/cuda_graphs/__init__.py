"""Segments that are captured once as graphs of the device, and then replayed.

```
cut.py        a segment: stretches of ops of the device, and what runs between them
replayed.py   inputs at fixed addresses, capture after a warm-up, replay, recapture
cuda.py       what captures on CUDA
```
"""

from typing import Any

from .cuda import CudaGraphs
from .replayed import replayed

capturer: type[CudaGraphs] | Any = CudaGraphs  # tests put one in its place that needs no GPU

__all__ = ["capturer", "replayed"]
