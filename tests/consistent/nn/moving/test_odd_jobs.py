"""Jobs that are not a model and an optimizer alone go on after a move as if they had stayed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import Placement
from tests.ranks import ALL, on_ranks

X = torch.randn(18, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Where = tuple[list[int], Any]
THERE_AND_BACK: list[Where] = [([0, 1, 2], "zero3"), ([1, 2], "zero1"), ([0, 1, 2], "zero3")]
ON: list[Where] = [([2, 0], "data"), ([0, 1], "zero2")]  # one of them, in turns


def on(ranks: list[int]) -> Placement:
    return Placement("cpu", ranks)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()


class Job:
    """What is trained. Subclasses say what is odd about it."""

    rel = 1e-10
    stay = 2  # steps at each place of a route

    def __init__(self, where: Where | None) -> None:
        self.model: Any = self.made()
        if where is not None:  # else it stays plain
            consistent.parallelize(self.model, on(where[0]), where[1])
        self.optimizer = self.optimizer_of([p for p in self.model.parameters() if p.requires_grad])

    def made(self) -> nn.Module:
        return net()

    def optimizer_of(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02)

    def loss(self, x: torch.Tensor) -> Any:
        return self.model(x).square().mean()

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def move(self, where: Where) -> None:
        consistent.move(self.model, self.optimizer, on(where[0]), where[1])


def losses(kind: type[Job], route: Sequence[Where | None]) -> list[float]:
    """Losses of some steps at each place of a route; a job without a place is plain torch's."""
    job = kind(route[0])
    found = []
    for k, x in enumerate(X[: job.stay * len(route)]):
        place = route[k // job.stay]
        if k % job.stay == 0 and k > 0 and place is not None:
            job.move(place)
        found.append(job.step(x))
    return found


JOBS: dict[str, type[Job]] = {}


def job(kind: type[Job]) -> type[Job]:
    JOBS[kind.__name__] = kind
    return kind


@job
class WithLBFGS(Job):
    """Its state is one flat vector of all parameters, and lists of such."""

    rel = 1e-8

    def optimizer_of(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=4)

    def step(self, x: torch.Tensor) -> float:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        return float(self.optimizer.step(closure))


class Odd(torch.optim.Optimizer):
    """Momentum in nested state, in state of no parameter, and in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.shadow: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        shared = state["shared"]
        for group in self.param_groups:
            for k, p in enumerate(group["params"]):
                nested = state[p].setdefault("nested", {"pair": [p * 0, p.new_zeros(2)]})
                nested["pair"][0].mul_(0.5).add_(p.grad)
                nested["pair"][1].add_(p.grad.sum())
                shared.setdefault("count", p.grad.sum() * 0).add_(p.grad.sum())
                if len(self.shadow) <= k:
                    self.shadow.append(p.clone())
                self.shadow[k].lerp_(p, 0.1)
                scale = 1 + 0.01 * shared["count"].tanh() + 0.01 * nested["pair"][1].mean().tanh()
                p.sub_(group["lr"] * scale * (nested["pair"][0] + 0.1 * (p - self.shadow[k])))


@job
class WithOddState(Job):
    def optimizer_of(self, params: Any) -> torch.optim.Optimizer:
        return Odd(params)


@job
class WithTwoOptimizers(Job):
    def optimizer_of(self, params: Any) -> Any:
        self.both = [
            torch.optim.SGD(params[:2], lr=0.1, momentum=0.9),
            torch.optim.Adam(params[2:], lr=0.02),
        ]
        return self.both[0]

    def step(self, x: torch.Tensor) -> float:
        for each in self.both:
            each.zero_grad()
        loss = self.loss(x)
        loss.backward()
        for each in self.both:
            each.step()
        return loss.item()

    def move(self, where: Where) -> None:
        consistent.move(self.model, self.both, on(where[0]), where[1])


@job
class WithScaler(Job):
    def __init__(self, where: Where | None) -> None:
        super().__init__(where)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item() + self.scaler.get_scale()


@job
class WithAverage(Job):
    """A copy of the model that is moved by itself."""

    def __init__(self, where: Where | None) -> None:
        super().__init__(where)
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=decay)

    def step(self, x: torch.Tensor) -> float:
        found = super().step(x)
        self.average.update_parameters(self.model)
        with torch.no_grad():
            return found + self.average(x).square().mean().item()

    def move(self, where: Where) -> None:
        super().move(where)
        consistent.move(self.average.module, None, on(where[0]), where[1])


@job
class WithTeacher(Job):
    """A copy of the model that learns nothing, and a loss that asks both."""

    def __init__(self, where: Where | None) -> None:
        super().__init__(where)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, x: torch.Tensor) -> Any:
        return F.mse_loss(self.model(x), self.teacher(x * 2))

    def move(self, where: Where) -> None:
        super().move(where)
        consistent.move(self.teacher, None, on(where[0]), where[1])


@job
class WithFrozen(Job):
    def made(self) -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        model[2].bias.requires_grad_(False)
        return model


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, inner.out_features, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


@job
class WithAdapters(Job):
    def made(self) -> nn.Module:
        model = net()
        model[0], model[2] = Adapted(model[0]), Adapted(model[2])
        return model


@job
class ThawedLater(Job):
    """Frozen and thawed around a move."""

    def optimizer_of(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def made(self) -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    def step(self, x: torch.Tensor) -> float:
        found = super().step(x)
        for p in self.model[0].parameters():
            p.requires_grad_(not p.requires_grad)
        return found


@job
class WithTied(Job):
    def made(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
        model[2].weight = model[0].weight
        return model


@job
class WithStatistics(Job):
    """Buffers of several dtypes, one that is not saved, and weights that are computed."""

    def made(self) -> nn.Module:
        model = nn.Sequential(*net(), nn.BatchNorm1d(5).double())
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[2])
        model.register_buffer("extra", torch.arange(3), persistent=False)
        return model


@job
class WithRecurrence(Job):
    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.LSTM(5, 4, num_layers=2, batch_first=True).double()

    def loss(self, x: torch.Tensor) -> Any:
        return self.model(x.unsqueeze(0))[0].square().mean()


@job
class Checkpointed(Job):
    def loss(self, x: torch.Tensor) -> Any:
        y: Any = checkpoint(self.model, x, use_reentrant=False)
        return y.square().mean()


@job
class CompiledByTorch(Job):
    """Torch's own compiler is given the model, and move the model inside what it made."""

    def __init__(self, where: Where | None) -> None:
        super().__init__(where)
        self.compiled: Any = self.model
        if where is not None:
            self.compiled = torch.compile(self.model, backend="eager")

    def loss(self, x: torch.Tensor) -> Any:
        return self.compiled(x).square().mean()


@job
class SteppedInBackward(Job):
    """An optimizer for each parameter, which a hook steps."""

    def optimizer_of(self, params: Any) -> Any:
        self.each = {p: torch.optim.Adam([p], lr=0.02) for p in params}

        def hook(p: Any) -> None:
            self.each[p].step()
            self.each[p].zero_grad()

        for p in params:
            p.register_post_accumulate_grad_hook(hook)
        return None

    def step(self, x: torch.Tensor) -> float:
        loss = self.loss(x)
        loss.backward()
        return loss.item()

    def move(self, where: Where) -> None:
        consistent.move(self.model, list(self.each.values()), on(where[0]), where[1])


@job
class CompiledStep(Job):
    """A step that was compiled before a move. On the way back its first program is met again."""

    stay = 3  # in the third step its program runs

    def __init__(self, where: Where | None) -> None:
        super().__init__(where)
        for group in self.optimizer.param_groups:
            group["foreach"] = False

        @consistent.compile(backend="ops")
        def step(x: torch.Tensor) -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(x)
            loss.backward()
            self.optimizer.step()
            return loss

        self.compiled: Any = None if where is None else step

    def step(self, x: torch.Tensor) -> float:
        return super().step(x) if self.compiled is None else self.compiled(x).item()

    def move(self, where: Where) -> None:
        parts = [each for made in self.compiled.programs for each in made.program.segments]
        assert any(each._shards for each in parts)
        super().move(where)
        assert not any(each._shards for each in parts)  # nobody keeps the memory of before


@pytest.mark.parametrize("kind", JOBS)
@on_ranks(3)
def test_odd_jobs_go_on(rank: int, kind: str) -> None:
    """There and back, and on to others."""
    turn = list(JOBS).index(kind) % len(ON)
    route = [*THERE_AND_BACK, *(ON if ALL else ON[turn : turn + 1])]
    wanted = losses(JOBS[kind], [None] * len(route))
    assert losses(JOBS[kind], route) == pytest.approx(wanted, rel=JOBS[kind].rel)


class Shifted(nn.Linear):
    """It got a buffer after it was parallelized."""

    shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


@on_ranks(2)
def test_buffers_that_were_added_later_reach_ranks_that_come_in(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = consistent.parallelize(Shifted(5, 5).double(), on([0]), "data")
    model.register_buffer("shift", torch.full((5,), 1.0 + rank, dtype=torch.float64))
    consistent.move(model, None, on([1]))
    assert model.shift.tolist() == [1] * 5
