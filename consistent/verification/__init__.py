"""Holds a training step under plans, or in a program of several ranks, against one process.

```
verify.py    what a caller asks and gets: verify(step, plans=...), Verified
  worlds.py    runs a step on n forked ranks and brings back what each has seen
    watch.py     on one rank: what ops, gradients, parameters and results were
  compare.py   walks what was seen in two worlds, in order, and finds the first tensor that differs
    held.py      one tensor as its ranks hold it; the tensor that they hold together
    kinds.py     names what is wrong with it
  page.py      the same as a page
fixtures.py  a fixture for pytest
```
"""

from .verify import Verified, verify

__all__ = ["Verified", "verify"]
