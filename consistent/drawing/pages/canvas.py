"""Timeline of a page, drawn on an HTML canvas: one lane per row, with time to the right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mirrored.readable import on_one_line

from .html import escape

MAX_DRAWN = 20_000  # maximum number of events in a timeline; a trace file holds them all

# (index of the lane, name, begin, length or -1 (both in microseconds), site, detail, and a colour
# if it is not the lane's)
Drawn = tuple[Any, ...]


def canvas(title: str, note: str, lanes: Sequence[tuple[str, str]], events: Sequence[Drawn]) -> str:
    """Return a heading, a note and a timeline as HTML; the page's script draws the timeline.

    Args:
        title: the heading.
        note: HTML of the note.
        lanes: (name, one of the colours in style.py) of each row of the timeline.
        events: the events to draw, see ``Drawn``.
    """
    content = {"lanes": [*map(_readable_row, lanes)], "events": [*map(_readable_row, events)]}
    # In HTML, "</script>" inside a string would end the script element.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<h2>{escape(title)}</h2><p class=note>{note}</p><canvas id=time></canvas>"
        "<p id=told class=note>Turn the wheel to zoom, drag to move, double click to see all, "
        "point at an event to read it.</p>"
        f'<script type="application/json" id="events">{data}</script>'
    )


def _readable_row(row: Sequence[Any]) -> list[Any]:
    return [on_one_line(each) if isinstance(each, str) else each for each in row]
