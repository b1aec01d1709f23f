"""Programs that run for real and in a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import consistent
from consistent import B, S
from consistent.auto import Wire
from consistent.auto.machines.known import KNOWN
from consistent.auto.machines.op_signature import tensors_of
from consistent.auto.machines.work import kind_of
from consistent.auto.simulation.callers import Callers
from consistent.auto.simulation.log import Mark, SimulatedOp
from consistent.auto.simulation.real_memory import MemoryRecorder
from consistent.cost_model.built_in import BUILT_IN
from consistent.dispatch.plans.shards import plain
from consistent.spec.nested import tensors_in
from mirrored.comm import Link
from mirrored.transports.counting import Call, counting
from mirrored.transports.default import current

WIDTH, ROWS = 64, 24
LEAST = 64  # smaller tensors, and whole numbers, may be values that a simulation computes


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(-2)), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Tokens to the next ones."""

    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def begin(ranks: int, plan: Any, shape: tuple[int, ...]) -> Any:
    """A step of the model, as a function of nothing."""
    torch.manual_seed(0)
    placement = consistent.placement(
        "cpu",
        torch.arange(ranks).view(shape).tolist(),
        axes=("dp", "tp")[: len(shape)] if isinstance(plan, dict) else None,
    )
    model = consistent.parallelize(Model(), placement, plan, verbose=False)
    splits = plan != "tensor"
    layout = [S(0) if splits and axis == 0 else B for axis in range(len(shape))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 100, (ROWS, 40))

    def step() -> None:
        x = consistent.distribute(tokens, placement, layout)
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Stages:
    """A model in stages, and how it is trained.

    Args:
        ranks: ranks of each stage.
        dtype: of the parameters; of bfloat16 ones the optimizer keeps copies in float32.
        varies: "frozen", "buffers" or "tied": what is unlike the plain model.
    """

    stages: int = 2
    ranks: int = 1
    plan: str | None = None
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    optimizer: Any = partial(torch.optim.AdamW, lr=1e-3)
    varies: str = ""
    clips: bool = False
    to_none: bool = True

    def model(self) -> Model:
        """The model, with a block or more for each stage."""
        model = Model(_LARGE, self.stages)
        if self.varies == "frozen":
            model.blocks.requires_grad_(False)
            model.embed.requires_grad_(False)
        if self.varies == "buffers":
            for block in model.blocks:
                block.register_buffer("scale", torch.ones(1000, _LARGE))
                block.register_forward_hook(lambda block, args, out: out * block.scale[:40])
        if self.varies == "tied":
            model.head.weight = model.embed.weight
        return model.to(self.dtype)


def muon(params: list[Any]) -> torch.optim.Optimizer:
    """Muon for the matrices among the parameters."""
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-3)


_LARGE = 256  # the weights of narrower models are small values, which a simulation may compute


def begin_stages(made: Stages) -> Any:
    """A step of a model in stages, as a function of nothing."""
    torch.manual_seed(0)
    model = made.model()
    ranks = range(made.stages * made.ranks)
    pipe = consistent.nn.pipeline(
        model,
        [consistent.placement("cpu", ranks[k : k + made.ranks]) for k in ranks[:: made.ranks]],
        split=[f"blocks.{k}" for k in range(1, made.stages)],
        loss=lambda out, target: loss_of(out.float(), target),
        micro_batches=4,
        schedule=made.schedule,
        plan=made.plan,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = made.optimizer(trained)
    if made.dtype is torch.bfloat16:
        consistent.master_weights(optimizer)
    tokens = torch.randint(0, 100, (ROWS, 40))

    def step(before_update: Callable[[], Any] = lambda: None) -> None:
        optimizer.zero_grad(set_to_none=made.to_none)
        pipe.step(tokens, tokens)
        if made.clips:
            nn.utils.clip_grad_norm_(trained, 1.0)
        before_update()
        optimizer.step()

    return step


class _Calling(TorchDispatchMode):
    """Counts ops on floating-point tensors of more than ``LEAST`` elements, by who calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.callers, self.found = Callers(), Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            given = [plain(x) for x in tensors_in((args, out)) if x.is_floating_point()]
            here = [x for x in given if not x.is_meta]  # others are of stages on other ranks
            if kind_of(func) != "view" and any(x.numel() > LEAST for x in here):
                self.found[self.callers.op_caller(), str(func)] += 1
        return out


def called(rank: int, make: Any, *args: Any) -> Counter[tuple[str, str]]:
    """How often each (caller, op) occurs in the second step."""
    step = make(*args)
    step()
    with _Calling() as mode, mode.callers.observing():
        step()
    return mode.found


def measured(rank: int, make: Any, *args: Any) -> tuple[list[Call], int, Link | None]:
    """(what this rank sends, the most memory that it holds) in the third step, and what messages
    cost here. In the second one ranks may still agree on memory that they share."""
    return _measured(2, make, *args)


def _measured(before: int, make: Any, *args: Any) -> tuple[list[Call], int, Link | None]:
    with MemoryRecorder() as held:
        step = make(*args)
        for _ in range(before):
            step()
        held.reset_peak()
        with counting() as log:
            step()
    return log.calls, held.peak, current().link("cpu")


def measured_stages(rank: int, made: Stages, updates: bool) -> tuple[Any, ...]:
    """What ``measured`` returns, and if asked for how often each op occurs in the optimizer's part
    of that step, on tensors that this rank holds; of the second step, which sends the same."""
    modes: list[_Calling] = []

    def make() -> Callable[[], None]:
        step = begin_stages(made)

        def step_and_count() -> None:
            mode = _Calling()
            with ExitStack() as inside:
                step(partial(inside.enter_context, mode) if updates else lambda: None)
            modes.append(mode)

        return step_and_count

    found = _measured(1, make)
    return *found, Counter(op for _, op in modes[-1].found.elements())


def simulated(ranks: int, link: Link | None, hosts: int, make: Any, *args: Any) -> Any:
    """Two steps on so many hosts, in each of which ranks share memory, with links that cost what
    they cost the real ranks: sizes of buckets depend on it. Nothing is timed."""
    cost = BUILT_IN["cpu"] if link is None else None
    wire = Wire(cost.latency, cost.bandwidth) if cost else Wire(link.latency_s, link.bytes_per_s)
    machine = replace(
        KNOWN["h100-8"],
        device_type="cpu",
        ranks_per_host=-(-ranks // hosts),
        inside=wire,
        message_start_s=0.0,
    )
    with consistent.simulate(ranks=ranks, machine=machine) as sim:
        step = make(*args)
        for _ in range(2):
            step()
    return sim


def runs(event: Any) -> bool:
    """Whether an event is an op that ``_Calling`` counts."""
    if not isinstance(event, SimulatedOp) or not event.work.runs:
        return False
    given = tensors_of(event.work.key) + tensors_of((event.work.key.out,))
    return any(x.dtype.is_floating_point and math.prod(x.shape) > LEAST for x in given)


def last_step(sim: Any) -> list[Any]:
    """The events of the last step."""
    steps = [i for i, e in enumerate(sim.events) if isinstance(e, Mark) and e.what == "step"]
    return sim.events[steps[-2] : steps[-1]]
