"""A program as text."""

from __future__ import annotations

from .program import Program


def text(program: Program) -> str:
    """One line for each op."""
    lines = [f"program of {program.name}"]
    for i, part in enumerate(program.segments):
        lines.append(f"segment {i}: {len(part.reads)} values read, {len(part.writes)} written")
        lines.append(str(part.graph.graph))
        if part.live is not None:
            lines.append(f"call {part.text}, as it is written")
    return "\n".join(lines)
