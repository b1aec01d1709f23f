"""What an import of the library costs programs that have no global tensor.

    python benchmarks/plain_programs.py

Each program runs in processes of its own that take turns: one without the library, one that has
imported it, one that has also made a global tensor. Printed is the time of the last two over that
of the first, the best of several turns.
"""

from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("without", "imported", "one global tensor")
NUMBERS = [float(k) for k in range(100_000)]


def _step() -> Callable[[], object]:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = torch.randn(16, 32), torch.randint(8, (16,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def _saved() -> Callable[[], object]:
    state = {str(k): torch.randn(16, 16) for k in range(50)}

    def save() -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)

    return save


def _small() -> Callable[[], object]:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    return lambda: [torch.matmul(x, y).add_(x).relu() for _ in range(100)]


PROGRAMS: dict[str, Callable[[], Callable[[], object]]] = {
    "100 small ops": _small,
    "a step of an MLP, AdamW": _step,
    "a tensor of 100,000 numbers": lambda: lambda: torch.tensor(NUMBERS),
    "as_tensor of 100,000 numbers": lambda: lambda: torch.as_tensor(NUMBERS),
    "torch.save and load of 50 tensors": _saved,
    "pickle.dumps of a function of torch": lambda: lambda: pickle.dumps(torch.as_tensor),
    "get_rng_state and set_rng_state": lambda: lambda: torch.set_rng_state(torch.get_rng_state()),
    "100 calls of torch.rand": lambda: lambda: [torch.rand(4) for _ in range(100)],
}


def _time(program: str, way: str, seconds: float) -> float:
    """Seconds for one call, the best of the calls in ``seconds``."""
    torch.set_num_threads(1)
    if way != WAYS[0]:
        import consistent

        if way == WAYS[2]:
            consistent.zeros(2, placement=consistent.placement("cpu", [0]), sbp=consistent.B)
    call = PROGRAMS[program]()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn of one program")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "WAY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(_time(*given.one, given.seconds))
        return
    print(f"{'program':40}{'imported':>12}{'one global tensor':>20}")
    for program in PROGRAMS:
        best = dict.fromkeys(WAYS, float("inf"))
        for _ in range(given.turns):
            for way in WAYS:
                command = [sys.executable, __file__, "--seconds", str(given.seconds)]
                command += ["--one", program, way]
                said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                best[way] = min(best[way], float(said.stdout))
        ratios = [best[way] / best[WAYS[0]] for way in WAYS[1:]]
        print(f"{program:40}{ratios[0]:>12.2f}{ratios[1]:>20.2f}", flush=True)


if __name__ == "__main__":
    main()
