"""Imported last by the process that ranks are forked from: no collection of garbage, there or in a
fork, looks at what is imported by now. Each would take a second, and copy what forks share."""

from __future__ import annotations

import gc

gc.freeze()
