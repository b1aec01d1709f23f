"""The timeline as a file that Perfetto opens. Times are those of the host's clock, which its
processes share, so that the files of the ranks of one host can be put together."""

from __future__ import annotations

from typing import Any

from ..drawing import traces
from .timeline import Timeline


def trace_text(timeline: Timeline) -> str:
    """The events as JSON."""
    rank = timeline.rank or 0
    threads = list(dict.fromkeys(event.thread for event in timeline.events))
    made: list[dict[str, Any]] = [traces.rank_name(rank)]
    for number, _ in enumerate(threads):
        name = f"thread {number}" if number else "program"
        made.append(traces.thread_name(rank, number, name))
    for event in timeline.events:
        known = {"at": event.site, "for": event.detail, "bytes": event.nbytes}
        one = {
            "name": event.name,
            "cat": event.kind,
            "ts": event.begin / 1e3,
            "pid": rank,
            "tid": threads.index(event.thread),
            "args": {name: value for name, value in known.items() if value},
        }
        if event.end is None:
            made.append({**one, "ph": "i", "s": "t"})
        else:
            made.append({**one, "ph": "X", "dur": (event.end - event.begin) / 1e3})
    return traces.trace_text(made)
