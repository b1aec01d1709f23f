"""What an op costs when it meets a shape for the first time, beside DTensor and plain torch.

    python benchmarks/new_shapes.py
        one process, one gloo rank: what an op costs at a new shape and at a known one
    python benchmarks/new_shapes.py --shapes 100000
        also: what so many shapes leave in memory, and the longest time that a call takes

Decoding with a key-value cache, ragged batches and results whose size depends on data meet a new
shape at every op. On a shared machine the fastest of several rounds is taken, and only the ratios
count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import consistent
from benchmarks.overhead import Make, makers_on
from benchmarks.process_group import start
from consistent import S

Op = Callable[[torch.Tensor], object]
DIM = 8
ROUNDS = 6
COUNTS = {"plain": 100, "ours": 100, "DTensor": 20}  # calls in a round


def ops(make: Make) -> dict[str, Op]:
    """The ops of overhead.py, on a matrix with DIM columns and any number of rows."""
    w, b = make(torch.randn(DIM, DIM), "weight"), make(torch.randn(DIM), "weight")
    return {
        "add": lambda x: x + x,
        "relu": lambda x: torch.relu(x),
        "x * 2.0": lambda x: x * 2.0,
        "x + rows": lambda x: x + x.shape[0],
        "matmul": lambda x: x @ w,
        "linear": lambda x: F.linear(x, w, b),
        "layer_norm": lambda x: F.layer_norm(x, (DIM,), b, b),
        "softmax": lambda x: F.softmax(x, dim=-1),
        "view": lambda x: x.view(-1, 2, DIM // 2),
        "transpose": lambda x: x.transpose(0, 1),
        "cat": lambda x: torch.cat([x, x], dim=1),
        "indexing": lambda x: x[:, 1:3],
    }


def spent(op: Op, xs: Sequence[torch.Tensor]) -> float:
    """Microseconds for each call, over the inputs `xs`."""
    begin = time.perf_counter()
    for x in xs:
        op(x)
    return (time.perf_counter() - begin) / len(xs) * 1e6


def new_and_known(makers: dict[str, Make]) -> dict[str, dict[str, tuple[float, float]]]:
    """Op -> kind of tensor -> (microseconds at a new shape, at a known one), the least of all
    rounds; each round's shapes are new to all ops."""
    made = {kind: ops(make) for kind, make in makers.items()}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for turn in range(ROUNDS):
        for (kind, make), (name, _) in itertools.product(makers.items(), made["plain"].items()):
            op, count = made[kind][name], COUNTS[kind]
            first = 50 + turn * count
            xs = [make(torch.randn(first + i, DIM), "data") for i in range(count)]
            new = spent(op, xs)
            spent(op, xs[:1] * 10)
            known = spent(op, xs[:1] * count)
            before = found.setdefault(name, {}).get(kind, (new, known))
            found[name][kind] = (min(before[0], new), min(before[1], known))
    return found


def show(found: dict[str, dict[str, tuple[float, float]]]) -> None:
    columns = [f"{kind} {shape}" for kind in COUNTS for shape in ("new", "known")]
    columns += ["ours new - known", "DTensor new - known"]
    print(f"Microseconds a call\n{'':12}" + "".join(f"{c:>20}" for c in columns))
    for name, row in found.items():
        cells = [each for kind in COUNTS for each in row[kind]]
        cells += [row[kind][0] - row[kind][1] for kind in ("ours", "DTensor")]
        print(f"{name:12}" + "".join(f"{cell:20.2f}" for cell in cells), flush=True)


# -- what many shapes leave behind -----------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
        "keepcost".split()
    ]


def live_megabytes() -> float:
    """Megabytes allocated and not freed. Resident memory is more: glibc keeps much of what is
    freed."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return (info.uordblks + info.hblkhd) / 1e6


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def many_shapes(count: int) -> None:
    """Every op once at each of `count` shapes."""
    placement = consistent.placement("cpu", [0])
    own: list[Op] = [
        lambda x: x + x,
        lambda x: x * 2.0,
        torch.relu,
        lambda x: x.view(-1, x.shape[2]),
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:3],
        lambda x: x + x.shape[0],
        lambda x: F.softmax(x, -1),
        lambda x: torch.cat([x, x], 1),
    ]

    def calls(shape: tuple[int, ...]) -> None:
        x = consistent.from_local(torch.empty(shape), placement, S(0), shape=shape)
        for op in own:
            op(x)

    shapes = _shapes(count)
    for shape in itertools.islice(shapes, 3):
        calls(shape)
    gc.collect()
    live, resident, longest = live_megabytes(), resident_megabytes(), 0.0
    for shape in shapes:
        begin = time.perf_counter()
        calls(shape)
        longest = max(longest, time.perf_counter() - begin)
    gc.collect()
    print(
        f"{count} shapes, {len(own)} ops each: {live_megabytes() - live:.1f} MB more allocated, "
        f"{resident_megabytes() - resident:.1f} MB more resident; the longest {len(own)} calls "
        f"took {longest * 1e3:.1f} ms"
    )


def _shapes(count: int) -> Iterator[tuple[int, ...]]:
    every = itertools.product(range(2, 60), range(3, 60), range(2, 60))
    return itertools.islice(every, count)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=int, default=0)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    start("cpu")
    show(new_and_known(makers_on("cpu")))
    if options.shapes:
        many_shapes(options.shapes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
