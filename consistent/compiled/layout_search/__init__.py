"""Joint choice of the layouts of all ops of a recorded step (``layouts="auto"``).

By default, each op chooses its layouts alone when it is called ("op by op"), which may send more
than necessary over the whole step.

```
2nd call   recorded; each global op is noted with its operands         listen, chain
           layouts for each op that send less in total                 problem, choose
3rd call   recorded again, each op with the chosen layouts             follow
later      the program of the two that sends less                      trial
```
"""

from .trial import Trial

__all__ = ["Trial"]
