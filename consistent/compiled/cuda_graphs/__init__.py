"""Segments that are captured as device graphs once, and then replayed.

```
cut.py        a segment: stretches of device ops, and what runs between them
replayed.py   inputs at fixed addresses, capture after a warm-up, replay, recapture
cuda.py       capture on CUDA
```
"""

from typing import Any

from .cuda import CudaGraphs
from .replayed import replayed

capturer: type[CudaGraphs] | Any = CudaGraphs  # tests replace it by one that needs no GPU

__all__ = ["capturer", "replayed"]
