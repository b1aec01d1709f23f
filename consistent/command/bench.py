"""``python -m consistent bench``: a short table of timings on this machine, in a few seconds.

An op on global tensors is compared with the same op on plain tensors of the shard's shape, so the
ratio is the overhead of a global tensor. A boxing (redistribution between layouts) is compared with
the same boxing sent as messages of torch.distributed. Rounds of both alternate, and the fastest
round of each counts; every rank makes the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mirrored.transports.default import current, use

from ..spec import B, P, Placement, S, Sbp
from ..spec.bytes_text import bytes_text
from ..tensor.making.create import from_local
from .info import chain
from .process import ranks

ROUNDS, CALLS = 7, 200  # calls of an op in a round
SIZES = (64 * 1024, 4 * 1024 * 1024)  # bytes of boxed tensors
BOXINGS: tuple[tuple[str, Sbp, Sbp], ...] = (
    ("all-gather", S(0), B),
    ("reduce-scatter", P, S(0)),
    ("all-reduce", P, B),
    ("all-to-all", S(0), S(1)),
)

_Row = tuple[str, float, float]  # name, microseconds of the library and of the baseline


def main(words: list[str]) -> int:
    """Measure on all ranks, and print the table on the first; return exit status 0.

    ``words``, the arguments of the command, are not used.
    """
    with ranks() as prints, torch.no_grad():
        everywhere = Placement.all("cpu")
        size = everywhere.size
        tables = [
            (
                f"{size} rank{'s' if size > 1 else ''}, op on a shard",
                "plain torch",
                _ops(everywhere),
            )
        ]
        if size > 1:
            tables.append(("boxing", "messages", _boxings(everywhere)))
        if prints:
            print("\n\n".join(table(*each) for each in tables))
            if size == 1:
                print("\nBoxings need ranks: torchrun --nproc_per_node 2 -m consistent bench")
    return 0


def _ops(everywhere: Placement) -> list[_Row]:
    """Return the times of a few ops on global tensors, and on plain tensors of a shard's shape."""
    plain = torch.ones(8, 8), torch.ones(8, 8), torch.ones(8)
    x, w, b = (
        from_local(each, everywhere, sbp, check=False)
        for each, sbp in zip(plain, (S(0), B, B), strict=True)
    )
    runs: list[tuple[str, Callable[..., object], int]] = [
        ("add [8, 8]", torch.add, 1),
        ("linear [8, 8]", F.linear, 3),
        ("layer_norm [8, 8]", lambda x, w, b: F.layer_norm(x, (8,), b, b), 3),
        ("matmul [256, 256]", torch.matmul, 2),
    ]
    rows = []
    for name, run, count in runs:
        shards, globals_ = (plain[0], *plain[1:])[:count], (x, w, b)[:count]
        if count == 1:
            shards, globals_ = (plain[0], plain[0]), (x, x)
        if "256" in name:
            shards = torch.ones(256, 256), torch.ones(256, 256)
            globals_ = tuple(
                from_local(each, everywhere, sbp, check=False)
                for each, sbp in zip(shards, (S(0), B), strict=True)
            )
        rows.append((name, *_time_alternately(lambda: run(*globals_), lambda: run(*shards), CALLS)))  # noqa: B023
    return rows


def _boxings(everywhere: Placement) -> list[_Row]:
    """Return the times of boxings by the current transport, and by torch.distributed messages."""
    messages, rows = chain(current())[-1], []
    for nbytes in SIZES:
        side = int((nbytes // 4) ** 0.5)
        for name, src, dst in BOXINGS:
            size = everywhere.size
            shard = torch.ones(side // size if src is S(0) else side, side)
            if side % size:
                shard = torch.ones(size * (side // size) // (size if src is S(0) else 1), side)
            x = from_local(shard, everywhere, src, check=False)

            def box(x: object = x, dst: Sbp = dst) -> object:
                return x.to_global(sbp=dst)  # type: ignore[attr-defined]

            def by_messages(box: Callable[[], object] = box) -> object:
                with use(messages):
                    return box()

            calls = max(3, CALLS // (4 * nbytes // SIZES[0]))
            rows.append(
                (f"{name} of {bytes_text(nbytes)}", *_time_alternately(box, by_messages, calls))
            )
    return rows


def _time_alternately(
    first: Callable[[], object], second: Callable[[], object], calls: int
) -> tuple[float, float]:
    """Return the microseconds of a call of ``first`` and of ``second``, in the fastest round.

    A round is ``calls`` calls of one of the two; rounds of both alternate.
    """
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        # In turn, so that a slow phase of the machine meets both.
        for i, run in enumerate((first, second)):
            run()  # not timed: warms up
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            best[i] = min(best[i], (time.perf_counter() - begin) / calls * 1e6)
    return best[0], best[1]


def table(title: str, beside: str, rows: list[_Row]) -> str:
    """Return ``rows`` as the text of a table, with the ratio of the two times of each row.

    Args:
        title: heading of the names in the first column.
        beside: heading of the second time, with which the first is compared.
        rows: (name, first time, second time), in microseconds.
    """
    heads = (title, "us", f"us, {beside}", "ratio")
    cells = [(n, f"{a:,.1f}", f"{b:,.1f}", f"{a / b:.2f}") for n, a, b in rows]
    widths = [max(len(row[i]) for row in [heads, *cells]) for i in range(4)]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
        for row in [heads, *cells]
    )
