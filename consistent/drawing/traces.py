"""Trace files for Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: "Trace Event Format", the JSON form of Chrome's tracing. Times are in microseconds; each
rank is a process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def trace_text(events: Sequence[dict[str, Any]]) -> str:
    """Return the JSON text of a trace file with these events."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def rank_name(rank: int) -> dict[str, Any]:
    """Return the trace event that names the process of ``rank``."""
    return _metadata_event("process_name", rank, 0, f"rank {rank}")


def thread_name(rank: int, thread: int, name: str) -> dict[str, Any]:
    """Return the trace event that names a thread in the process of ``rank``."""
    return _metadata_event("thread_name", rank, thread, name)


def _metadata_event(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
