"""Steps of stages as text and as a page."""

from __future__ import annotations

from pathlib import Path

from mirrored.readable import readable

from ..drawing.files import check_page_path, write
from .engine import Engine


def show(engine: Engine, micro_batches: int, path: str | Path | None) -> str:
    """The schedule and the program that was recorded last, as text; with ``path`` also as a page.

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
    from .page import page  # pages and pictures are loaded when they are asked for
    from .picture import SchedulePicture

    program, table = engine.programs[-1], engine.table(micro_batches)
    picture = SchedulePicture(table if program.losses else table.forwards())
    if path is not None:
        write(path, page(engine.name, program, picture, engine.placements, engine.modules()))
    return readable(f"{picture.text(blocks=False)}\n\n{program}")
