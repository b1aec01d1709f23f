"""A whole training step as one program: recorded while it runs, compiled, and from then on run
instead of the step.

```
step --2nd call--> recorder     ops on shards, messages, random numbers, in order
                       |        memory.py: which value is in which memory
                       v        reached.py: where parameters, buffers, gradients are kept
                   program      segments of ops, and between them calls that run as written
                       |
                   passes/      equal messages merged, ...
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
