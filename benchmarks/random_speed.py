"""Time of our random ops beside torch's own, one thread:

    python benchmarks/random_speed.py [--device cuda]

On CUDA it also prints the bandwidth of ours, for the bytes that must be written (and read, for
dropout), and that of a copy that moves as many bytes.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from benchmarks.device_time import Run, copying, seconds
from consistent.forms.native import load as native

COUNTS = {"cpu": 1 << 24, "cuda": 1 << 28}  # more than a cache holds
KEY = {"seed": 1, "counter": 2}
ROUNDS = 9


@dataclass(frozen=True)
class Case:
    """Ours, torch's, and the bytes that must be moved, if they bound the speed."""

    ours: Run
    theirs: Run
    nbytes: int | None


def cases(dtype: torch.dtype, device: str) -> dict[str, Case]:
    x = torch.rand(COUNTS[device], dtype=dtype, device=device)

    def fill(ours: Run, theirs: Run) -> Case:
        return Case(ours, theirs, x.nbytes)

    return {
        "uniform_": fill(lambda: native.uniform_(x, **KEY), lambda: x.uniform_()),
        "normal_": fill(lambda: native.normal_(x, **KEY), lambda: x.normal_()),
        "bernoulli_": fill(lambda: native.bernoulli_(x, 0.5, **KEY), lambda: x.bernoulli_(0.5)),
        "randint_": fill(lambda: native.randint_(x, 0, 99, **KEY), lambda: x.random_(0, 99)),
        "exponential_": fill(lambda: native.exponential_(x, **KEY), lambda: x.exponential_()),
        "dropout": Case(
            lambda: native.dropout(x, 0.5, **KEY), lambda: F.dropout(x, 0.5), 2 * x.nbytes
        ),
    }


def cut(device: str) -> dict[str, Case]:
    """Shards of the last dim: their short runs are a case that torch's generator does not have."""
    result = {}
    for width in (1, 3, 16, 128):
        x = torch.empty(COUNTS[device] // 16 // width, width, device=device)
        where = {"starts": [0, width], "logical_sizes": [x.shape[0], 3 * width]}
        result[f"normal_, runs of {width}"] = Case(
            lambda x=x, where=where: native.normal_(x, **KEY, **where),
            lambda x=x: x.normal_(),
            x.nbytes,
        )
    return result


def permutations(device: str) -> dict[str, Case]:
    n = COUNTS[device] // 16
    return {
        "randperm": Case(
            lambda: native.randperm(n, **KEY, device=device),
            lambda: torch.randperm(n, device=device),
            None,
        )
    }


def milliseconds(run: Run, device: str) -> float:
    """Milliseconds of the fastest run; on CUDA, which nothing else disturbs, of the median run."""
    pick = min if device == "cpu" else statistics.median
    times = [seconds(run, device) for _ in range(ROUNDS + 1)]
    return pick(times[1:]) * 1e3


def show(what: str, rows: dict[str, Case], device: str) -> None:
    for name, case in rows.items():
        a, b = milliseconds(case.ours, device), milliseconds(case.theirs, device)
        digits = 2 if device == "cpu" else 3
        line = f"{what + ' ' + name:28}{a:10.{digits}f}{b:10.{digits}f}{b / a:14.2f}"
        if device == "cuda" and case.nbytes is not None:
            copy = milliseconds(copying(case.nbytes, device), device)
            speeds = [case.nbytes / t / 1e6 for t in (a, copy)]
            line += f"{speeds[0]:10.0f}{speeds[1]:12.0f}{copy / a:10.1%}"
        print(line, flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args(given).device
    torch.set_num_threads(1)
    more = f"{'GB/s':>10}{'copy, GB/s':>12}{'of copy':>10}" if device == "cuda" else ""
    print(f"{'':28}{'ours, ms':>10}{'torch, ms':>10}{'torch / ours':>14}{more}")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        show(str(dtype).removeprefix("torch."), cases(dtype, device), device)
    show("", cut(device), device)
    show("int64", permutations(device), device)


if __name__ == "__main__":
    main()
