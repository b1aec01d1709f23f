"""Verify that a step under plans, or in a program of several ranks, computes what one process does.

```
verify.py    the call and its result: verify(step, plans=...), Verified
  worlds.py    runs a step on n forked ranks and brings back what each has recorded
    watch.py     on one rank: records ops, gradients, parameters and results
  compare.py   compares the records of two worlds in order, and finds the first wrong tensor
    held.py      one tensor as its ranks hold it, and the tensor that they hold together
    kinds.py     names what is wrong with it
  page.py      the result as an HTML page
fixtures.py  a fixture for pytest
```
"""

from .verify import Verified, verify

__all__ = ["Verified", "verify"]
