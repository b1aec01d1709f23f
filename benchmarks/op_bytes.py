"""Bytes that ops move: ours, DTensor's, and the least that the mathematics needs (least.py), on
gloo ranks.

    python -m benchmarks.op_bytes                    the calls of op_calls*.py, every split dim
    python -m benchmarks.op_bytes --ops softmax      calls whose names match
    python -m benchmarks.op_bytes --json out/op_bytes.json

`S(d)`: the first input is split, the others are whole. `S(d) all`: every input of as many dims is
split in the same way. Bytes are those that the busiest rank sends under the usual algorithms
(mirrored/transports/counting.py), for DTensor as for us. gloo has no all-to-all; what DTensor calls
instead counts as the all-to-all it stands for. A partial result still needs a reduction. For both
sides and in the least it counts as a reduce-scatter, or as an all-reduce if the result has no dim.
A result that differs from plain torch's counts as `wrong`, an error as `raises`.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import op_calls_along  # noqa: F401 - registers its calls
from benchmarks.least import Case, least
from benchmarks.op_calls import CALLS, OpCall
from mirrored.transports.counting import counting
from tests.ranks import RankError, pool

Layout = tuple[int | None, ...]
Figure = float | str  # bytes, or how the call failed
HANGS = 30.0  # seconds after which a call counts as hanging


def shape_of(given: Any) -> tuple[int, ...]:
    """The shape in an input's description."""
    return given[-1] if isinstance(given[0], str) else given


def make_inputs(call: OpCall) -> list[torch.Tensor]:
    """The same numbers on every rank."""
    g = torch.Generator().manual_seed(0)
    made = []
    for given in call.inputs:
        if given[0] == "int":
            made.append(torch.randint(0, given[1], given[2], generator=g))
        elif given[0] == "bool":
            made.append(torch.rand(given[1], generator=g) > 0.5)
        else:
            made.append(torch.randn(given, generator=g))
    return made


def layouts(call: OpCall, n: int) -> Iterator[tuple[str, Layout]]:
    """The split dims of the first input, alone and with all inputs of as many dims."""
    shapes = [shape_of(given) for given in call.inputs]
    for d, size in enumerate(shapes[0]):
        if size < n:
            continue
        yield f"S({d})", tuple(d if i == 0 else None for i in range(len(shapes)))
        alike = tuple(d if len(s) == len(shapes[0]) and s[d] >= n else None for s in shapes)
        if sum(e is not None for e in alike) > 1:
            yield f"S({d}) all", alike


class Collectives(TorchDispatchMode):
    """Adds up the bytes of collectives that DTensor and FSDP2 issue."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0
        self.halved = False  # an all-gather that DTensor uses for an all-to-all

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = str(func)
        if "c10d" in name or "_dtensor" in name:
            self.bytes += self._sent(name, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        n = dist.get_world_size()
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        t = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        if "allgather_base" in name:  # FSDP2's, given (whole, part)
            return t * (n - 1) / n
        if "reduce_scatter_base" in name:  # given (part, whole)
            return t * (n - 1)
        if "all_gather" in name or "allgather" in name:
            return t * (n - 1) / (n if self.halved else 1)
        if "all_reduce" in name or "allreduce" in name:
            return 2 * t * (n - 1) / n
        if (
            "reduce_scatter" in name
            or "all_to_all" in name
            or "alltoall" in name
            or "shard_dim" in name
        ):
            return t * (n - 1) / n
        if "broadcast" in name or "scatter_" in name:
            return t * (n - 1)
        return 0.0


@contextmanager
def counting_dtensor() -> Iterator[Collectives]:
    """Count what DTensor sends."""
    import torch.distributed.tensor._collective_utils as utils
    import torch.distributed.tensor.placement_types as places

    mode, inner = Collectives(), utils.shard_dim_alltoall

    def all_to_all(*args: Any, **kwargs: Any) -> Any:
        mode.halved = True
        try:
            return inner(*args, **kwargs)
        finally:
            mode.halved = False

    holders = [m for m in (utils, places) if hasattr(m, "shard_dim_alltoall")]
    for module in holders:
        module.shard_dim_alltoall = all_to_all  # type: ignore[attr-defined]
    try:
        with mode:
            yield mode
    finally:
        for module in holders:
            module.shard_dim_alltoall = inner  # type: ignore[attr-defined]


def first_tensor(value: Any) -> Any:
    """The first output."""
    while isinstance(value, tuple | list):
        value = value[0]
    return value


def owed(partial: bool, out: torch.Tensor, n: int) -> float:
    """Bytes of the reduction that a partial result needs."""
    if not partial:
        return 0.0
    return out.numel() * out.dtype.itemsize * (n - 1) / n * (1 if out.ndim else 2)


def ours(call: OpCall, layout: Layout, n: int, expected: torch.Tensor) -> Figure:
    """Bytes that global tensors move."""
    import consistent
    from consistent import B, S

    placement = consistent.placement.all("cpu")
    xs = [
        consistent.distribute(x, placement, B if d is None else S(d))
        for x, d in zip(make_inputs(call), layout, strict=True)
    ]
    with counting() as log:
        out = first_tensor(call.call(*xs))
    spread = out.full() if isinstance(out, consistent.GlobalTensor) else out
    partial = isinstance(out, consistent.GlobalTensor) and out.sbp[0].is_partial
    # Objects are notes by which ranks compare plain tensors, the first times that an op meets some.
    sent = sum(call.bytes for call in log.calls if call.name != "gather_objects")
    return judged(sent + owed(partial, out, n), spread, expected)


def theirs(call: OpCall, layout: Layout, n: int, expected: torch.Tensor) -> Figure:
    """Bytes that DTensor moves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (n,))
    xs = [
        distribute_tensor(x, mesh, [Replicate() if d is None else Shard(d)])
        for x, d in zip(make_inputs(call), layout, strict=True)
    ]
    with counting_dtensor() as log:
        out = first_tensor(call.call(*xs))
    spread = out.full_tensor() if isinstance(out, DTensor) else out
    partial = isinstance(out, DTensor) and out.placements[0].is_partial()
    return judged(log.bytes + owed(partial, out, n), spread, expected)


def judged(nbytes: float, value: torch.Tensor, expected: torch.Tensor) -> Figure:
    """``nbytes`` if the value is right, else "wrong"."""
    try:
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    except AssertionError:
        return "wrong"
    return nbytes


def measure(
    rank: int, index: int, side: str, n: int, only: str = ""
) -> list[tuple[str, Figure, float]]:
    """(layout, bytes, least) of one call on this rank, under one or all. Runs in the pool."""
    warnings.simplefilter("ignore")
    call = CALLS[index]
    inputs = make_inputs(call)
    expected = first_tensor(call.call(*inputs))
    case = Case(
        tuple(tuple(x.shape) for x in inputs), tuple(x.dtype.itemsize for x in inputs),
        tuple(expected.shape), expected.dtype.itemsize, n,
    )  # fmt: skip
    found: list[tuple[str, Figure, float]] = []
    for name, layout in layouts(call, n):
        if only not in ("", name):
            continue
        try:
            figure = (ours if side == "ours" else theirs)(call, layout, n, expected)
        except Exception as error:  # noqa: BLE001 - the figure then says that it raised
            figure = f"raises {type(error).__name__}: {error}"[:200]
        found.append((name, figure, least(call.ways, case, layout)))
    return found


def busiest(figures: list[Figure]) -> Figure:
    """The figure of all ranks: an error if there is any, else the most bytes."""
    return next((f for f in figures if isinstance(f, str)), None) or max(figures)


def by_layout(index: int, side: str, n: int, only: str = "") -> dict[str, tuple[Figure, float]]:
    """{layout: (bytes, least)} of one call."""
    try:
        by_rank = pool(n).run(measure, index, side, n, only, timeout=HANGS)
    except RankError as error:
        if only:
            return {only: (f"hangs {error}"[:300], float("nan"))}
        # One layout left a rank waiting, so the layouts are run one by one.
        names = [name for name, _ in layouts(CALLS[index], n)]
        return {k: v for name in names for k, v in by_layout(index, side, n, name).items()}
    return {s[0][0]: (busiest([x[1] for x in s]), s[0][2]) for s in zip(*by_rank, strict=True)}


def collect(pattern: str, n: int) -> list[dict[str, Any]]:
    """One line for each call and layout."""
    lines: list[dict[str, Any]] = []
    for index, call in enumerate(CALLS):
        if not re.search(pattern, call.name):
            continue
        mine, rival = (by_layout(index, side, n) for side in ("ours", "DTensor"))
        for name, (figure, bound) in mine.items():
            found = dict(
                op=call.name, layout=name, ours=figure, DTensor=rival[name][0], least=bound
            )
            lines.append(found)
            print(shown(found), flush=True)
    return lines


def shown(line: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [
        f"{v:,.0f}" if not isinstance(v, str) else v.split(":")[0][:24]
        for v in (line["ours"], line["DTensor"])
    ]
    mark = "" if isinstance(line["ours"], str) or at_least(line, "ours") else "above least"
    if above(line):
        mark += " ABOVE DTensor"
    start = f"{line['op']:26} {line['layout']:10} {cells[0]:>24} {cells[1]:>24}"
    return f"{start} {line['least']:>12,.0f}  {mark}"


def at_least(line: dict[str, Any], side: str) -> bool:
    """Whether a side moves no more than the least, apart from a few bytes of scalars and
    rounding."""
    return line[side] <= line["least"] * 1.01 + 16


def above(line: dict[str, Any]) -> bool:
    """Whether ours moves more bytes than DTensor, whose result is right."""
    mine, rival = line["ours"], line["DTensor"]
    return not isinstance(rival, str) and (isinstance(mine, str) or mine > rival * 1.01 + 16)


def summary(lines: list[dict[str, Any]]) -> str:
    """The counts of all lines, in words."""
    right = [x for x in lines if not isinstance(x["ours"], str)]
    both = [x for x in lines if not isinstance(x["DTensor"], str)]
    ended = Counter(x["DTensor"].split()[0] for x in lines if isinstance(x["DTensor"], str))
    below = [x for x in right if x["ours"] < x["least"] * 0.99 - 16]
    mine, rival = (
        sum(at_least(x, side) for x in found)
        for side, found in (("ours", right), ("DTensor", both))
    )
    sent = [sum(x[side] for x in both if x in right) for side in ("ours", "DTensor")]
    count = max(1, len(lines))
    return "\n".join(
        (
            f"\n{len({x['op'] for x in lines})} calls, {len(lines)} pairs of call and layout",
            f"ours: right in {len(right)}; at the least in {mine} ({100 * mine / count:.1f} %)",
            f"  below the least (by a way that least.py lacks): {_named(below)}",
            f"DTensor: right in {len(both)}, {dict(ended)}; at the least in {rival} "
            f"({100 * rival / count:.1f} %)",
            f"ours above DTensor: {_named([x for x in lines if above(x)])}",
            f"bytes where both are right: ours {sent[0]:,.0f}, DTensor {sent[1]:,.0f}",
        )
    )


def _named(lines: list[dict[str, Any]]) -> str:
    return ", ".join(f"{x['op']} {x['layout']}" for x in lines) or "none"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    print(f"{'op':26} {'layout':10} {'ours':>24} {'DTensor':>24} {'least':>12}")
    lines = collect(options.ops, options.ranks)
    print(summary(lines))
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
