"""The strategy that a search finds for this machine beside plans written by hand, run for real in
turn: small models of many architectures, on ranks of this machine.

    python benchmarks/found.py                        all models of tests/models on 2 and 4 ranks
    python benchmarks/found.py --models Llama Bert --ranks 2 --rounds 40

Each model is searched in a process of its own with ``machine="this"``: measured figures, nothing of
the plans written by hand is known to it. ``auto`` is the plan whose layouts are chosen op by op for
a step (``best_plan``), on all ranks and without stages. Then all ways train on the same ranks, one
step each in turn, round after round, one thread a rank. Losses are compared to those of plain
torch. Of a way the fastest quarter of its rounds counts, by the slowest rank: what disturbs one
round disturbs the others of that round as well. Where what was found is one of the plans by hand,
"= data" says so: both run the same, and their ratio is noise.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import consistent
from consistent import B, S
from consistent.auto import Strategy
from consistent.nn.planners.layout_search import best_plan
from tests.models.architectures import MODELS

BY_HAND = ("data", "zero1", "zero2", "zero3", "tensor", "tensor+sequence")
FOUND, AUTO, STEPS = "found", "auto", 3
Step = Callable[[], Any]


def plain(name: str) -> list[float]:
    """Losses of plain torch."""
    model, inputs = MODELS[name]()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def by_hand(name: str, plan: str) -> Step:
    """A step under a plan, as one writes it."""
    model, inputs = MODELS[name]()
    place = consistent.placement.all("cpu")
    consistent.parallelize(model.train(), place, plan, verbose=False)
    layout = B if plan.startswith("tensor") else S(0)
    inputs = {
        k: consistent.distribute(x, place, layout) if isinstance(x, torch.Tensor) else x
        for k, x in inputs.items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        return loss

    return step


def auto(name: str) -> Step:
    """A step under the plan whose layouts are chosen op by op."""
    model, inputs = MODELS[name]()
    place = consistent.placement.all("cpu")

    def followed(model: Any, inputs: Any) -> None:
        model(**inputs)["loss"].backward()

    plan = best_plan(followed, place, (model.train(), inputs))
    consistent.parallelize(model, place, plan, inputs=B, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        return loss

    return step


def found(name: str, path: str) -> Step:
    """A step of a strategy that is in a file."""
    model, inputs = MODELS[name]()
    pipe = Strategy.load(path).apply(model.train(), lambda out, _: out["loss"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Any:
        optimizer.zero_grad()
        loss = pipe.step(inputs)
        optimizer.step()
        return loss

    return step


def begin_of(way: str, name: str, path: str) -> Step:
    """A step of a model under one of the ways."""
    if way == FOUND:
        return found(name, path)
    return auto(name) if way == AUTO else by_hand(name, way)


def searched(name: str, ranks: int, path: str) -> tuple[str, str, float]:
    """(what was found, the plan by hand that it is or "", processor seconds of the search); the
    strategy comes into a file."""
    model, inputs = MODELS[name]()
    begin = time.process_time()
    made = consistent.search(
        model.train(), ranks, inputs, loss=lambda out, _: out["loss"], machine="this"
    )
    made.best.save(path)
    choice = made.tried[0].choice
    same = next(iter(choice.plan.values()), "") if choice.is_plain else ""
    return f"{choice}", same, time.process_time() - begin


def be_rank(rank: int, ranks: int, store: str, asked: Any, answers: Any, rounds: int) -> None:
    """Times all ways of each model that it is asked for."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    while (name := asked.get()) is not None:
        name, path = name
        times: dict[str, list[float]] = {}
        steps, wrong = {}, {}
        wanted = plain(name)
        for way in (FOUND, AUTO, *BY_HAND):
            try:
                step = begin_of(way, name, path)
                losses = [float(step().full()) for _ in range(STEPS)]
            except Exception as error:
                wrong[way] = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            error = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
            if error > 1e-4:
                wrong[way] = f"losses are off by {error:.1e}"
            steps[way], times[way] = step, []
        for _ in range(rounds):
            for way, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                step()
                times[way].append(time.perf_counter() - begin)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, times)
        if rank == 0:
            slowest = {w: list(map(max, zip(*(t[w] for t in everyone)))) for w in times}
            answers.put(({w: quarter(each) for w, each in slowest.items()}, wrong))
    dist.barrier()
    os._exit(0)


def quarter(times: list[float]) -> float:
    """The mean of the fastest quarter."""
    few = sorted(times)[: math.ceil(len(times) / 4)]
    return sum(few) / len(few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    context = get_context("spawn")
    print("found / fastest by hand, ms a step; s: processor seconds of the search")
    for ranks in args.ranks:
        ratios, same = [], []
        with tempfile.TemporaryDirectory() as folder:
            asked = [context.Queue() for _ in range(ranks)]
            answers = context.Queue()
            workers = [
                context.Process(
                    target=be_rank,
                    args=(r, ranks, f"{folder}/store", asked[r], answers, args.rounds),
                )
                for r in range(ranks)
            ]
            for worker in workers:
                worker.start()
            for name in args.models:
                try:
                    choice, hand, spent = searched(name, ranks, f"{folder}/{name}.yaml")
                except Exception as error:
                    print(f"{ranks} {name:16} no strategy: {str(error).partition(chr(10))[0]}")
                    continue
                for queue in asked:
                    queue.put((name, f"{folder}/{name}.yaml"))
                times, wrong = answers.get(timeout=600)
                made = told(name, ranks, choice, hand, spent, times, wrong)
                ratios += made
                same += made if hand else []
            for queue in asked:
                queue.put(None)
            for worker in workers:
                worker.join(30)
                worker.kill()
        near, near_same = (sum(ratio <= 1.1 for ratio in each) for each in (ratios, same))
        print(
            f"{ranks} ranks: {near} of {len(ratios)} within 10 % of the fastest by hand, "
            f"the mean {sum(ratios) / max(len(ratios), 1):.2f}; "
            f"{near_same} of the {len(same)} that are a plan by hand",
            flush=True,
        )


def told(
    name: str,
    ranks: int,
    choice: str,
    hand_plan: str,
    spent: float,
    times: dict[str, float],
    wrong: dict[str, str],
) -> list[float]:
    """Print the line of a model; its ratio, if what was found ran right."""
    hand = {way: t for way, t in times.items() if way in BY_HAND and way not in wrong}
    line = f"{ranks} {name:16} {spent:5.1f} s  "
    for way, error in wrong.items():
        line += f"[{way}: {error:.60}] "
    if FOUND not in times or FOUND in wrong or not hand:
        print(line, choice, flush=True)
        return []
    best = min(hand, key=lambda way: hand[way])
    ratio = times[FOUND] / hand[best]
    each = " ".join(f"{way} {t * 1e3:.1f}" for way, t in sorted(hand.items(), key=lambda x: x[1]))
    same = f" = {hand_plan}" if hand_plan else ""
    line += f"{ratio:5.2f}  found {times[FOUND] * 1e3:.1f} ({choice}{same})  "
    if AUTO in times and AUTO not in wrong:
        line += f"auto {times[AUTO] * 1e3:.1f} ({times[AUTO] / hand[best]:.2f})  "
    print(f"{line}{each}", flush=True)
    return [ratio]


if __name__ == "__main__":
    main()
