"""Show a staged step as text and as an HTML page."""

from __future__ import annotations

from pathlib import Path

from mirrored.readable import escape_invisible

from ..drawing.files import check_page_path, write
from .engine import Engine


def show(engine: Engine, micro_batches: int, path: str | Path | None) -> str:
    """Return the schedule and the last recorded program as text, for ``Pipeline.show``.

    Args:
        engine: the engine that runs the pipeline.
        micro_batches: the number of micro-batches of the schedule.
        path: if given, the file to write both to, as an HTML page.

    Raises:
        RuntimeError: no step ran yet.
        ValueError: ``path`` does not end in .html.
    """
    if not engine.programs:
        raise RuntimeError(
            f"{engine.name}.show: no step ran yet, and a program is recorded by its first step.\n"
            "  Run a step before."
        )
    if path is not None:
        check_page_path(path)
    from .page import page  # imported only when something is shown
    from .picture import SchedulePicture

    program, table = engine.programs[-1], engine.table(micro_batches)
    picture = SchedulePicture(table if program.losses else table.forwards())
    if path is not None:
        write(path, page(engine.name, program, picture, engine.placements, engine.modules()))
    return escape_invisible(f"{picture.text(blocks=False)}\n\n{program}")
