"""A whole training step as one program: recorded while it runs, compiled, and run instead of it.

```
step --2nd call--> recorder     ops on shards, messages, random numbers, in order
                       |        memory.py: which value is in which memory
                       v        state.py: where parameters, buffers, gradients are kept
                   program      segments of ops, and calls that run as they are written between them
                       |
                   passes/      equal messages merged, ...
                       v
                   backend      Inductor, or op by op
--later calls-->   read state, run, put results back
```
"""

from .checks import (
    check_backend,
    check_cuda_graph,
    check_fuse,
    check_layouts,
    check_memory,
    check_overlap,
)
from .compile import CompiledStep, compile_step
from .errors import CannotRecord

__all__ = [
    "CannotRecord",
    "CompiledStep",
    "check_backend",
    "check_cuda_graph",
    "check_fuse",
    "check_layouts",
    "check_memory",
    "check_overlap",
    "compile_step",
]
