"""Compilation of a whole training step, communication included: the step is recorded while it runs,
and from then on the compiled recording (a "program") runs in its place.

```
step --2nd call--> recorder     ops on shards, messages, random numbers, in order
                       |        memory.py: which value is in which memory
                       v        reached.py: parameters, buffers, gradients and other state
                   program      segments of ops, and between them calls that run as written
                       |
                   passes/      optimizations, such as merging equal messages
                       v
                   backends/    Inductor, whose code may serve several sizes, or op by op
--later calls-->   read state, run, put results back
```
"""

from .compile import CompiledStep, compile_step
from .errors import CannotRecord
from .options import CompileOptions, Options, shows_options

__all__ = [
    "CannotRecord",
    "CompileOptions",
    "CompiledStep",
    "Options",
    "compile_step",
    "shows_options",
]
