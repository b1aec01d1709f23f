"""Pipelines: bubbles beside the schedules' formulas, times beside torch's own pipelining, memory.

    python benchmarks/pipeline.py              4 ranks for bubbles, 2 for times and memory
    python benchmarks/pipeline.py --rounds 3   instead of 4: the whole takes three minutes
    python benchmarks/pipeline.py --hosts 2    ranks on two hosts: network namespaces, made by root

Bubbles: stages that sleep equally long, so that ranks need no cores of their own; a backward sleeps
twice as long as a forward, half of it for the input and half for the parameters. The formula's
bubble is that of the schedule's table with the same times. Times: the same stages of a GPT in turn,
round after round, one thread for each rank. Memory: what autograd keeps between forward and
backward on rank 0, at its peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from benchmarks.hosts import add_option, described, enter, hosts
from benchmarks.progress import doing
from consistent import Placement
from consistent.pipeline.schedules import SCHEDULES, stages_per_line
from consistent.pipeline.simulate import simulate_schedule

MICRO_BATCHES = 8
NAP_S = float(os.environ.get("NAP_S", 0.1))  # so long that what a busy machine adds is little


# -- stages that sleep -----------------------------------------------------------------------------


class Nap(torch.autograd.Function):
    """Sleep in forward for ``before`` seconds, in backward for ``after``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: float, after: float) -> torch.Tensor:
        ctx.after = after
        time.sleep(before)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        time.sleep(ctx.after)
        return grad, None, None


class Sleeper(nn.Module):
    """A stage: one nap forward, one for its input's gradient, one for its parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        from consistent.dispatch.plans.shards import attach, plain

        w: Any = self.weight
        shard = Nap.apply(plain(x), NAP_S, NAP_S) + Nap.apply(plain(w), 0.0, NAP_S)
        return attach(shard, x._spec)


def napping(stages: int) -> nn.Sequential:
    return nn.Sequential(*(Sleeper() for _ in range(stages)))


def bubbles(rank: int, rounds: int) -> list[tuple]:
    found = []
    world = [Placement("cpu", [r]) for r in range(dist.get_world_size())]
    x, y = torch.zeros(MICRO_BATCHES, 1), torch.zeros(MICRO_BATCHES, 1)
    for name in SCHEDULES:
        stages = len(world) * stages_per_line(name) if SCHEDULES[name].stages_per_line != 1 else 4
        names = [str(k) for k in range(1, stages)]
        pipe = consistent.nn.pipeline(
            napping(stages), world, names, loss=F.mse_loss, schedule=name,
            micro_batches=MICRO_BATCHES,
        )  # fmt: skip
        doing(f"bubbles: {name}") if rank == 0 else None
        pipe.step(x, y)
        seconds = min(timed(lambda p=pipe: p.step(x, y)) for _ in range(rounds))
        work = MICRO_BATCHES * stages / len(world) * 3 * NAP_S
        found.append(
            (name, stages, simulate_schedule(pipe.table).bubble, 1 - work / seconds, seconds)
        )
    return found


# -- a GPT -----------------------------------------------------------------------------------------

# Bytes as words: with a large vocabulary the last stage would have more to do than the first.
WIDTH, LENGTH, WORDS, BLOCKS = 384, 128, 256, 6


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Any) -> Any:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        heads = [t.unflatten(-1, (6, -1)).transpose(1, 2) for t in (q, k, v)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
    return nn.Sequential(Embed(), *(Block() for _ in range(BLOCKS)), head)


CUT = 4  # the first stage has the embedding and three blocks


def loss_of(logits: Any, target: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(WORDS, (2 * MICRO_BATCHES, LENGTH + 1))
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def ours(schedule: str) -> Callable[[], float]:
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = consistent.nn.pipeline(
        gpt(), world, [str(CUT)], loss=loss_of, schedule=schedule, micro_batches=MICRO_BATCHES
    )
    ids, target = batch()

    def step() -> float:
        for p in pipe.model.parameters():
            p.grad = None
        return pipe.step(ids, target).item()

    return step


def theirs(schedule: str) -> Callable[[], float]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, model, (ids, target) = dist.get_rank(), gpt(), batch()
    mine = model[:CUT] if rank == 0 else model[CUT:]
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    run: Any = get_schedule_class(schedule)(stage, MICRO_BATCHES, loss_fn=loss_of)  # type: ignore[call-arg]

    def step() -> float:
        for p in mine.parameters():
            p.grad = None
        losses: list[torch.Tensor] = []
        if rank == 0:
            run.step(ids)
        else:
            run.step(target=target, losses=losses)
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(total, 1)
        return total.item()

    return step


def lone() -> Callable[[], float]:
    """All of it on rank 0; the other one waits."""
    model, (ids, target) = gpt(), batch()

    def step() -> float:
        total = torch.zeros(())
        if dist.get_rank() == 0:
            for p in model.parameters():
                p.grad = None
            for a, b in zip(ids.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
                loss = loss_of(model(a), b) / MICRO_BATCHES
                loss.backward()
                total += loss.detach()
        dist.broadcast(total, 0)
        return total.item()

    return step


WAYS: dict[str, Callable[[], Callable[[], float]]] = {
    "one process, plain torch": lone,
    "ours, one at a time": lambda: ours("one at a time"),
    "ours, 1f1b": lambda: ours("1f1b"),
    "torch's pipelining, 1F1B": lambda: theirs("1F1B"),
    "ours, gpipe": lambda: ours("gpipe"),
    "torch's pipelining, GPipe": lambda: theirs("GPipe"),
}


def timed(step: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def times(rank: int, rounds: int) -> dict[str, tuple[list[float], float, float]]:
    torch.manual_seed(0)
    found: dict[str, tuple[list[float], float, float]] = {}
    steps = {name: make() for name, make in WAYS.items()}
    losses = {name: [step(), step()][0] for name, step in steps.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        doing(f"times: round {turn + 1} of {rounds}") if rank == 0 else None
        for name, step in steps.items():
            taken[name].append(timed(step))
    for name, step in steps.items():
        found[name] = taken[name], losses[name], kept_by(step)
    return found


class Kept:
    """Bytes that autograd keeps, each storage once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.uses: dict[int, int] = {}

    def pack(self, x: torch.Tensor) -> Any:
        return _Held(self, x)


class _Held:
    def __init__(self, kept: Kept, x: torch.Tensor) -> None:
        self.kept, self.x = kept, x
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.Tensor.untyped_storage(x)
        self.key, self.nbytes = storage.data_ptr(), storage.nbytes()
        if self.key not in kept.uses:
            kept.now += self.nbytes
            kept.peak = max(kept.peak, kept.now)
        kept.uses[self.key] = kept.uses.get(self.key, 0) + 1

    def __del__(self) -> None:
        self.kept.uses[self.key] -= 1
        if not self.kept.uses[self.key]:
            del self.kept.uses[self.key]
            self.kept.now -= self.nbytes


def kept_by(step: Callable[[], Any]) -> float:
    """MiB that autograd keeps in a step, at most; parameters count too."""
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.x):
        step()
    return kept.peak / (1 << 20)


# -- running it ------------------------------------------------------------------------------------


def be_rank(rank: int, ranks: int, path: str, what: str, rounds: int, answers: Any) -> None:
    warnings.filterwarnings("ignore")
    enter(rank, ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    found = {"bubbles": bubbles, "times": times}[what](rank, rounds)
    if rank == 0:
        answers.send(found)
    dist.barrier()
    os._exit(0)


def on_ranks(ranks: int, what: str, rounds: int) -> Any:
    context = get_context("spawn")
    # Not a queue: the thread that sends what is put into one may still have it when its rank ends.
    answers, answer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, f"{folder}/store", what, rounds, answer)
        processes = [context.Process(target=be_rank, args=(r, *given)) for r in range(ranks)]
        for process in processes:
            process.start()
        answer.close()  # so that nothing is waited for when rank 0 has ended without an answer
        found = answers.recv()
        for process in processes:
            process.join(30)
            process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipelines.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=["bubbles", "times"])
    add_option(parser)
    options = parser.parse_args()
    with hosts(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run what was asked for, and print it."""
    if options.only != "times":
        print(f"bubbles: 4 ranks, {MICRO_BATCHES} micro-batches, naps of {NAP_S * 1e3:.0f} ms")
        print(f"{'schedule':24}{'stages':>7}{'formula %':>11}{'measured %':>12}{'step ms':>9}")
        for name, stages, formula, measured, seconds in on_ranks(4, "bubbles", options.rounds):
            print(
                f"{name:24}{stages:7}{formula * 100:11.1f}{measured * 100:12.1f}"
                f"{seconds * 1e3:9.0f}"
            )
    if options.only != "bubbles":
        found = on_ranks(2, "times", options.rounds)
        print(
            f"\ntimes: 2 ranks on {described(options)}, a GPT of {BLOCKS} blocks of {WIDTH}, "
            f"{MICRO_BATCHES} micro-batches"
        )
        print(f"{'':28}{'ms, median':>11}{'kept MiB, rank 0':>18}{'loss':>9}")
        for name, (taken, loss, kept) in found.items():
            print(f"{name:28}{statistics.median(taken) * 1e3:11.0f}{kept:18.1f}{loss:9.4f}")
        ratio = [a / b for a, b in zip(found["ours, one at a time"][0], found["ours, 1f1b"][0])]
        beside = [
            a / b for a, b in zip(found["torch's pipelining, 1F1B"][0], found["ours, 1f1b"][0])
        ]
        print(f"one at a time / 1f1b: {statistics.median(ratio):.2f}")
        print(f"torch's 1F1B / ours: {statistics.median(beside):.2f}")


if __name__ == "__main__":
    main()
