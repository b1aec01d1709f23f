"""Write the timeline of a report as a trace file that Perfetto opens.

Times come from the host's clock, which its processes share, so the files of the ranks of one host
can be merged.
"""

from __future__ import annotations

from typing import Any

from ..drawing import traces
from .timeline import Timeline


def trace_text(timeline: Timeline) -> str:
    """Return the events of a timeline as JSON in Chrome's trace format."""
    rank = timeline.rank or 0
    threads = list(dict.fromkeys(event.thread for event in timeline.events))
    entries: list[dict[str, Any]] = [traces.rank_name(rank)]
    for number, _ in enumerate(threads):
        name = f"thread {number}" if number else "program"
        entries.append(traces.thread_name(rank, number, name))
    for event in timeline.events:
        details = {"at": event.site, "for": event.detail, "bytes": event.nbytes}
        # The format's times are in microseconds.
        entry = {
            "name": event.name,
            "cat": event.kind,
            "ts": event.begin / 1e3,
            "pid": rank,
            "tid": threads.index(event.thread),
            "args": {name: value for name, value in details.items() if value},
        }
        # An event without an end is drawn as an instant ("i"), others as a span ("X").
        if event.end is None:
            entries.append({**entry, "ph": "i", "s": "t"})
        else:
            entries.append({**entry, "ph": "X", "dur": (event.end - event.begin) / 1e3})
    return traces.trace_text(entries)
