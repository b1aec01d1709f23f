"""Export of a simulated step as a Chrome trace, for Perfetto.

Each simulated rank is a process, with a line for its work, its boxing and its wires.
"""

from __future__ import annotations

from typing import Any

from ...drawing import traces
from .timeline import Timeline

_LINES = {"compute": 1, "boxing": 2, "wire": 3}


def trace_text(timeline: Timeline) -> str:
    """Return the timeline as the JSON text of a Chrome trace."""
    events: list[dict[str, Any]] = []
    for rank, track in sorted(timeline.tracks.items()):
        events.append(traces.rank_name(rank))
        for name, line in (*_LINES.items(), ("schedule", 0)):
            events.append(traces.thread_name(rank, line, name))
        for span in track.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.kind,
                    "pid": rank,
                    "tid": _LINES.get(span.kind, 0),
                    "ts": span.begin * 1e6,
                    "dur": (span.end - span.begin) * 1e6,
                    "args": {"where": span.where, "bytes": span.bytes},
                }
            )
    return traces.trace_text(events)
