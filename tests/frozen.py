"""Imported last by the process that ranks are forked from, to make its forks cheap.

No collection of garbage, there or in a fork, looks at what is imported by now: each would take a
second, and copy what forks share. Nor do forks that end as an interpreter does take torch's
operators apart one by one, a tenth of a second each.
"""

from __future__ import annotations

import gc
import weakref

from torch import library

for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    alive = finalizer.peek()
    if alive is not None and alive[1] is library._del_library:
        finalizer.atexit = False
gc.freeze()
