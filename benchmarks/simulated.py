"""A step as it is simulated for this machine beside the same step on ranks: seconds, bytes, memory.

    python benchmarks/simulated.py
    python benchmarks/simulated.py --models mlp llama --rounds 30

Two ranks, one thread each, AdamW. Of each model the four plans are simulated, then run. A step
lasts as long as on its slowest rank; the median of the rounds counts, and beside it stands the
least. Bytes are those that rank 0 sends in a step, memory is that of its tensors, noted op by op.
Ops are timed when they are first met and kept in a file, so a second run simulates faster. The
simulation knows nothing of the real steps. Before each round both ranks time a few fixed calls:
"host" says how many times as long they took in the mean as the kept figures say, that is how much
slower the host is during these steps than when figures were measured, because of other programs or
its clock. "/ real" is the simulated time, "now" that times "host", both beside the real one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from benchmarks.gpt import VOCAB
from benchmarks.graph import TOKENS, LeNet, SmallGpt
from consistent import B, P, S
from consistent.auto.machines import Machine
from consistent.auto.machines.counted import works
from consistent.auto.simulation.holding import Holding
from consistent.auto.simulation.report import SimulatedStep
from mirrored.transports.counting import counting

RANKS, ROWS = 2, 32
PLANS = ("data", "zero3", "tensor", "two stages")


class Mlp(nn.Module):
    """Four layers that are wide enough to compute for a while."""

    def __init__(self) -> None:
        super().__init__()
        widths = (512, 2048, 2048, 2048, 10)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class Llama(nn.Module):
    """The logits of a transformers Llama of four layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                use_cache=False,
            )
        )

    def forward(self, tokens: Any) -> Any:
        return self.model(tokens).logits.flatten(0, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "mlp": (Mlp, ["layers.2"]),
    "lenet": (LeNet, ["layers"]),
    "gpt": (SmallGpt, ["blocks.1"]),
    "llama": (Llama, ["model.model.layers.2"]),
}


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    if name == "mlp":
        return torch.randn(256, 512), torch.randint(10, (256,))
    if name == "lenet":
        return torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    tokens = torch.randint(VOCAB, (ROWS, TOKENS))
    return tokens, tokens


def loss_of(out: Any, target: Any) -> Any:
    """The mean over rows or tokens."""
    return F.cross_entropy(out, target.flatten())


def begin(name: str, plan: str) -> Callable[[], None]:
    """A step, as it is written on ranks and in a simulation."""
    torch.manual_seed(0)
    make, split = MODELS[name]
    model, (x, y) = make(), batch(name)
    if plan == "two stages":
        places = [consistent.placement("cpu", [r]) for r in range(RANKS)]
        pipe = consistent.nn.pipeline(model, places, split=split, loss=loss_of, micro_batches=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            pipe.step(x, y)
            optimizer.step()

        return step
    place = consistent.placement("cpu", range(RANKS))
    consistent.parallelize(model, place, plan, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layout = B if plan == "tensor" else S(0)
    x, y = (consistent.distribute(t, place, layout) for t in (x, y))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def be_rank(rank: int, path: str, asked: Any, rounds: int, answers: Any) -> None:
    """Runs the plans of each model that it is asked for."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    place = consistent.placement.all("cpu")
    consistent.ones(2, placement=place, sbp=P).to_global(sbp=B)  # what messages cost is measured
    answers.put(None)
    while (name := asked.get()) is not None:
        found = {plan: measured(begin(name, plan), rounds) for plan in PLANS}
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, found)
        if rank == 0:
            answers.put({p: slowest([each[p] for each in everyone]) for p in PLANS})
    dist.barrier()
    os._exit(0)


@dataclass(frozen=True)
class Real:
    """What steps of a rank took: seconds of each, and of the fixed ops before each; the bytes that
    it sent in one, and the most that it held."""

    times: list[float]
    fixed: list[float]
    sent: int
    held: int


def measured(step: Callable[[], None], rounds: int) -> Real:
    """The steps of one pair, on a rank."""
    with Holding() as held:
        for _ in range(5):  # in the first ones ranks still compare plain values that ops meet
            step()
        held.forget()
        with counting() as log:
            step()
    times, fixed = [], []
    for _ in range(rounds):
        dist.barrier()
        fixed.append(fixed_seconds())
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return Real(times, fixed, log.bytes, held.peak)


def slowest(ranks: Sequence[Real]) -> Real:
    """Of each round the slowest rank; bytes and memory are those of the first one."""
    times = [max(each) for each in zip(*(rank.times for rank in ranks), strict=True)]
    fixed = [x for rank in ranks for x in rank.fixed]
    return Real(times, fixed, ranks[0].sent, ranks[0].held)


_FIXED = torch.ones(256, 1024), torch.ones(1024, 256), torch.ones(1 << 16), torch.ones(1 << 22)


def fixed_calls() -> None:
    """A few calls that tell how fast the host is just now, in its caches and out of them."""
    a, b, c, large = _FIXED
    for _ in range(5):
        torch.mm(a, b)
        for _ in range(20):
            torch.add(c, c)
    large.mul_(1.0)


def fixed_seconds() -> float:
    """What they take."""
    fixed_calls()
    start = time.perf_counter()
    fixed_calls()
    return time.perf_counter() - start


def fixed_kept(this: Machine) -> float:
    """What they take by the figures that are kept."""
    return sum(map(this.op_seconds, works(fixed_calls)))


def simulated(name: str, plan: str) -> SimulatedStep:
    """The step as it is simulated for this machine."""
    with consistent.simulate(ranks=RANKS, machine="this") as sim:
        step = begin(name, plan)
        for _ in range(3):
            step()
    return sim.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    context = get_context("spawn")
    answers, pairs = context.Queue(), []
    print(
        f"{'':18}{'ms, real':>10}{'least':>9}{'simulated':>11}{'/ real':>8}{'host':>6}{'now':>6}",
        end="",
    )
    print(f"{'bytes, real':>14}{'simulated':>12}{'MiB, real':>11}{'simulated':>11}{'/ real':>8}")
    with tempfile.TemporaryDirectory() as folder:
        asked = [context.Queue() for _ in range(RANKS)]
        given = (f"{folder}/store", args.rounds, answers)
        ranks = [
            context.Process(target=be_rank, args=(r, given[0], asked[r], *given[1:]))
            for r in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for _ in ranks:
            answers.get(timeout=600)
        for name in args.models:
            steps = {plan: simulated(name, plan) for plan in PLANS}
            for queue in asked:
                queue.put(name)
            found = answers.get(timeout=600)
            for plan, step in steps.items():
                tell(name, plan, found[plan], step)
                pairs.append((name, plan, found[plan], step))
        for queue in asked:
            queue.put(None)
        for rank in ranks:
            rank.join(30)
            rank.kill()
    conclude(pairs)


def host_of(real: Real, step: SimulatedStep) -> float:
    """How many times as long as the figures say calls took between these steps."""
    return statistics.mean(real.fixed) / fixed_kept(step.machine)


def tell(name: str, plan: str, real: Real, step: SimulatedStep) -> None:
    """A row of the table."""
    took, peak, host = statistics.median(real.times), step.peaks[0].bytes, host_of(real, step)
    print(
        f"{name + ', ' + plan:18}{took * 1e3:10.2f}{min(real.times) * 1e3:9.2f}"
        f"{step.seconds * 1e3:11.2f}{step.seconds / took:8.2f}"
        f"{host:6.2f}{step.seconds * host / took:6.2f}"
        f"{real.sent:14,}{step.bytes_of.get(0, 0):12,}"
        f"{real.held / 2**20:11.1f}{peak / 2**20:11.1f}{peak / real.held:8.2f}",
        flush=True,
    )


NEAR = 0.05  # plans whose real times differ by less are as fast as each other


def conclude(pairs: Sequence[tuple[str, str, Real, SimulatedStep]]) -> None:
    """How near all of them are, and whether plans are ranked right."""
    took = {(name, plan): statistics.median(real.times) for name, plan, real, _ in pairs}
    made = {(name, plan): step.seconds for name, plan, _, step in pairs}
    off = [abs(made[pair] / took[pair] - 1) for pair in took]
    hosts = [host_of(real, step) for _, _, real, step in pairs]
    now = [abs(made[pair] * host / took[pair] - 1) for pair, host in zip(took, hosts, strict=True)]
    for what, found in (("time", off), ("time, times host", now)):
        near = sum(x <= 0.15 for x in found)
        print(f"{what}: {near} of {len(found)} within 15 %, the furthest {max(found):.0%}")
    exact = sum(step.bytes_of.get(0, 0) == real.sent for _, _, real, step in pairs)
    held = [abs(step.peaks[0].bytes / real.held - 1) for _, _, real, step in pairs]
    print(f"bytes: {exact} of {len(off)} exact; memory: the furthest {max(held):.1%}")
    right, wrong = 0, []
    for a, b in combinations(took, 2):
        if a[0] != b[0] or abs(took[a] / took[b] - 1) <= NEAR:
            continue
        if (took[a] < took[b]) == (made[a] < made[b]):
            right += 1
        else:
            wrong.append(f"{a[0]}: {a[1]} and {b[1]}")
    print(
        f"order of two plans of a model that differ by more than {NEAR:.0%}: {right} right", end=""
    )
    print(f", {len(wrong)} wrong {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
