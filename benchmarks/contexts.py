"""Decoders, mixtures and encoder-decoders under the plan "context": whether a training step is that
of one process, for rows of one length, padded, packed and behind a window, and the bytes it sends.

    python benchmarks/contexts.py                   all, on 2, 3 and 4 ranks; into docs/models.md
    python benchmarks/contexts.py Llama --ranks 2 --out page.md

Beside tensor and zero3 the plan is tried on 2 x 2 ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import consistent
from benchmarks.models import Cell, row_of, run, told
from consistent import Placement
from tests.models.architectures import SINGLE
from tests.models.sequences import NAMES, SEQUENCES
from tests.models.steps import step, watched_step, worst
from tests.ranks import pool

BESIDE: dict[str, dict[str, str]] = {
    "with tensor": {"tp": "tensor", "cp": "context"},
    "with zero3": {"dp": "zero3", "cp": "context"},
}
WAYS = (*SEQUENCES, *BESIDE)
HEADING = "## Sequences in parts"
LIMIT = 300

_TEXT = (
    'The table shows a step under the plan `"context"`, in which each rank has two chunks of '
    "each sequence, an early and a late one (zigzag), on {ranks} ranks. `benchmarks/contexts.py` "
    "writes it. A number is the bytes that the busiest of {first} ranks sends in the step, if "
    "the step was correct for every number of ranks. The first four columns differ in the batch. "
    "*plain* has 12 rows of 6 tokens, and *padded* has rows of 11 tokens with a padding mask. "
    "*packed* has documents of 5, 1, 7 and 10 tokens in one row, as DataCollatorWithFlattening "
    "gives them. *windowed* has rows of 11 tokens with an attention window of 4. The last two "
    "columns combine the plan with another one, on 2 x 2; there the bytes are those of the "
    "busiest of 4 ranks."
)


def one(rank: int, name: str, way: str) -> tuple[float, int, list[str]]:
    """(error, bytes, ops that ran whole) of a step."""
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    make = SEQUENCES.get(way, SEQUENCES["plain"])
    plan: Any = BESIDE.get(way, "context")
    grid = Placement("cpu", [[0, 1], [2, 3]], axes=tuple(plan)) if way in BESIDE else None
    model, inputs = make(name)
    model = consistent.parallelize(model.eval(), grid or Placement.all("cpu"), plan)
    watched, found = watched_step(model, inputs)
    whole = {key: x.full() if hasattr(x, "full") else x for key, x in found.items()}
    error = 0.0
    if rank == 0:
        model, inputs = make(name)
        error = worst(whole, step(model.eval(), inputs))[1]
    return error, watched.bytes, watched.report.whole


def measure(names: Sequence[str], ranks: Sequence[int], out: Path) -> None:
    """Each model in each way on each number of ranks; the section is written after each number."""
    cells = {
        (name, way): Cell()
        for way in WAYS
        for name in NAMES.get(way, NAMES["plain"])
        if name in names
    }
    for n in ranks:
        for (name, way), cell in cells.items():
            if way in BESIDE and n != 4:
                continue
            first = 4 if way in BESIDE else ranks[0]
            limit = 1e-3 if name in SINGLE else 1e-5
            told(cell, n, first, limit, partial(pool(n).run, one, name, way, timeout=LIMIT))
            note = cell.errors.get(n, f"{cell.bytes:,}" if n == first else "right")
            print(f"{n} ranks  {name:14} {way:12} {note}", flush=True)
        pool(n).close()
        write(out, section(cells, ranks[: ranks.index(n) + 1]))


def section(cells: dict[tuple[str, str], Cell], ranks: Sequence[int]) -> str:
    """The section of the page."""
    shown = ", ".join(map(str, ranks))
    lines = [HEADING, "", fill(_TEXT.format(ranks=shown, first=ranks[0]), 150), ""]
    ways = [way for way in WAYS if way not in BESIDE or 4 in ranks]
    lines += [row_of(["model", *ways]), row_of(["---"] * (len(ways) + 1))]
    for name in dict.fromkeys(name for name, _ in cells):
        texts = []
        for way in ways:
            cell = cells.get((name, way))
            tried = [4] if way in BESIDE else ranks
            texts.append("" if cell is None else cell.text(tried))
        lines.append(row_of([name, *texts]))
    right = [sum(not c.errors for (_, w), c in cells.items() if w == way) for way in ways]
    asked = [sum(w == way for _, w in cells) for way in ways]
    counts = [f"{a} of {b}" for a, b in zip(right, asked, strict=True)]
    return "\n".join([*lines, row_of(["correct", *counts])]) + "\n"


def write(out: Path, text: str) -> None:
    """Put the section at the end of the page, in place of the one that is there."""
    page = out.read_text(encoding="utf-8") if out.exists() else ""
    out.write_text(page.partition(HEADING)[0].rstrip("\n") + "\n\n" + text, encoding="utf-8")


if __name__ == "__main__":
    run(__doc__, NAMES["plain"], measure)
