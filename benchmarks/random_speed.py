"""Time of our random ops beside torch's own, one thread: python benchmarks/random_speed.py"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from consistent.local import _native as native

COUNT = 1 << 24
KEY = {"seed": 1, "counter": 2}


def best(run: Callable[[], object], times: int = 9) -> float:
    """Milliseconds of the fastest run."""
    fastest = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e3


def cases(dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    x = torch.rand(COUNT, dtype=dtype)
    return {
        "uniform_": (lambda: native.uniform_(x, **KEY), lambda: x.uniform_()),
        "normal_": (lambda: native.normal_(x, **KEY), lambda: x.normal_()),
        "bernoulli_": (lambda: native.bernoulli_(x, 0.5, **KEY), lambda: x.bernoulli_(0.5)),
        "randint_": (lambda: native.randint_(x, 0, 99, **KEY), lambda: x.random_(0, 99)),
        "exponential_": (lambda: native.exponential_(x, **KEY), lambda: x.exponential_()),
        "dropout": (lambda: native.dropout(x, 0.5, **KEY), lambda: F.dropout(x, 0.5)),
    }


def cut() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Shards of the last dim: short runs, which a layout-blind generator does not have."""
    result = {}
    for width in (1, 3, 16, 128):
        x = torch.empty(COUNT // 16 // width, width)
        where = {"starts": [0, width], "logical_sizes": [x.shape[0], 3 * width]}
        result[f"normal_, runs of {width}"] = (
            lambda x=x, where=where: native.normal_(x, **KEY, **where),
            lambda x=x: x.normal_(),
        )
    return result


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':28}{'ours, ms':>10}{'torch, ms':>10}{'torch / ours':>14}")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        show(str(dtype).removeprefix("torch."), cases(dtype))
    show("", cut())
    n = COUNT // 16
    show("int64", {"randperm": (lambda: native.randperm(n, **KEY), lambda: torch.randperm(n))})


def show(what: str, rows: dict[str, tuple[Callable[[], object], Callable[[], object]]]) -> None:
    for name, (ours, theirs) in rows.items():
        a, b = best(ours), best(theirs)
        print(f"{what + ' ' + name:28}{a:10.2f}{b:10.2f}{b / a:14.2f}")


if __name__ == "__main__":
    main()
