"""Mixtures whose experts are a list of modules: a step is that of one process, each expert is on
one rank under its own names, and tokens are sent to it where the loop over experts allows that."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S
from consistent.nn.experts.list_forward import ListForward
from mirrored.transports.counting import counting
from tests.consistent.compiled.steps import beside
from tests.ranks import ALL, on_ranks

D, INNER, COUNT, K = 4, 6, 7, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, INNER), nn.Linear(INNER, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class Block(nn.Module):
    """Tokens [batch, length, D] that are each sent to K experts."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate: Any = nn.Linear(D, count)
        self.experts: Any = nn.ModuleList(Expert() for _ in range(count))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        weights, chosen = self.gate(h).softmax(-1).topk(K)
        return self.mixed(h, weights, chosen).view(x.shape)

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class OneHot(Block):
    """As in a Mixtral of transformers before its experts were stacked."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        weights, chosen = self.gate(h).softmax(-1).topk(K)
        out = torch.zeros(h.shape, dtype=h.dtype)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for e in range(len(self.experts)):
            slot, at = torch.where(mask[e])
            made = self.experts[e](h[None, at].reshape(-1, D)) * weights[at, slot, None]
            out.index_add_(0, at, made.to(h.dtype))
        return out.reshape(x.shape)


class Scattered(Block):
    """The mask is written to the places of the chosen experts."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask = torch.zeros(*chosen.shape, len(self.experts), dtype=torch.int64)
        mask.scatter_(-1, chosen[..., None], 1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(mask[..., e])
            out.index_add_(0, at, expert(h[at]) * weights[at, slot, None])
        return out


class Greater(Block):
    """One weight for each token and expert, which is zero for experts that are not chosen."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gates = (F.one_hot(chosen, len(self.experts)) * weights[..., None]).sum(1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            (at,) = torch.gt(gates[:, e], 0).nonzero(as_tuple=True)
            out.index_add_(0, at, expert(h[at]) * gates[at, e, None])
        return out


class Rows(Block):
    """As in Mistral's reference."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        weights, chosen = self.gate(h).topk(K)
        weights = F.softmax(weights, dim=1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            out[at] += weights[at, slot, None] * expert(h[at])
        return out.view(x.shape)


class Masks(Block):
    """As in small mixtures that are written to be read: one mask for an expert."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        top, chosen = scores.topk(K)
        scores = torch.full_like(scores, float("-inf")).scatter(-1, chosen, top).softmax(-1)
        out, h, flat = torch.zeros_like(x), x.view(-1, D), scores.view(-1, len(self.experts))
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            each = mask.view(-1)
            if each.any():
                out[mask] += (expert(h[each]) * flat[each, e].unsqueeze(1)).squeeze(1)
        return out


class Dims(Block):
    """Tokens of two dims, and experts without tokens are left out."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).sigmoid().topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            at, place, slot = torch.where(chosen == e)
            if at.numel() > 0:
                out[at, place] += expert(x[at, place]).mul(weights[at, place, slot, None])
        return out


class Dict(nn.ModuleDict):
    """Experts by names, in a module with a loop of its own; half of what they give counts."""

    def __init__(self, count: int) -> None:
        super().__init__({f"expert_{e}": Expert() for e in range(count)})
        self.drop = nn.Dropout(0.5)  # is no expert

    def forward(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for e in range(len(self) - 1):
            at, slot = torch.nonzero(chosen == e, as_tuple=True)
            made = self[f"expert_{e}"](h[at]) * weights[at, slot].unsqueeze(-1)
            made *= 0.5
            out.index_add_(0, at, made)
        return out


class Named(Block):
    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.experts = Dict(count).double()

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(h, chosen, weights)


class Halfway(Block):
    """The sum is read and written between two experts, and so are the tokens."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        h, out = h * 1.0, torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            out.index_add_(0, at, expert(h[at]) * weights[at, slot, None])
            if e == 1:
                h = h + out.mean()
            elif e == 2:
                h.mul_(1.5)
            elif e == 3:
                out.mul_(0.5)
        return out


class Kept(Block):
    """Results that are added after their tokens have been written."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        h, out, kept = h * 1.0, torch.zeros_like(h), []
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            kept.append((at, expert(h[at]) * weights[at, slot, None]))
            h.mul_(1.01)
        for at, made in kept:
            out.index_add_(0, at, made)
        return out


class Onto(Block):
    """An expert takes what those before it have added."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        h = h * 1.0
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            h.index_add_(0, at, expert(h[at]) * weights[at, slot, None])
        return h


class Before(Block):
    """Tokens are weighted before their expert, and sums are new tensors."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            out = out.index_add(0, at, expert(h[at] * weights[at, slot, None]))
        return out


class Paused(Block):
    """Some rows and some results have no gradient."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            with torch.set_grad_enabled(e != 1):
                rows = h[at]
            with torch.set_grad_enabled(e != 2):
                made = expert(rows)
            out.index_add_(0, at, made * weights[at, slot, None])
        return out


SENT = (OneHot, Rows, Masks, Dims, Named, Scattered, Greater)
AS_WRITTEN = (Halfway, Kept, Onto, Before, Paused)


def batch(size: int = 12) -> Tensor:
    return torch.randn(size, 3, D, dtype=torch.float64, generator=torch.manual_seed(5))


def step(model: nn.Module, x: Tensor) -> dict[str, Any]:
    x = x.detach().requires_grad_()
    out = model(x)
    (out * torch.linspace(-1, 1, D, dtype=x.dtype)).sum().backward()
    return {"out": out, "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def check(model: nn.Module, x: Tensor, placement: Placement, plan: Any, sbp: Any = None) -> int:
    """A step gives what a plain copy's gives; returns the rows that were sent to experts."""
    wanted = step(copy.deepcopy(model).eval(), x)
    consistent.parallelize(model.eval(), placement, plan)
    with consistent.report() as report:
        found = step(model, consistent.distribute(x, placement, sbp or S(0)))
    for name, value in wanted.items():
        if value is None:  # an expert that was not called
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name].full(), value, equal_nan=True)
    return sum(report.rows_of_experts.values())


@on_ranks(2, 3, *([4] if ALL else []))  # four are in the grid below
def test_a_step_is_that_of_one_process(rank: int) -> None:
    line, x = Placement.all("cpu"), batch()
    for number, kind in enumerate(SENT):
        assert check(kind(), x, line, "zero3+expert") == 12 * 3 * K, kind
        if ALL or number % 3 == 0:
            assert check(kind(), x, line, "expert", B) == 0  # no tokens are sent
    check(Rows(), batch(2), line, "expert")  # ranks without tokens
    for kind in AS_WRITTEN:
        model = kind()
        check(model, x, line, "expert")
        assert isinstance(model.__dict__["forward"], ListForward), kind


@on_ranks(2, 3)
def test_all_tokens_go_to_one_expert(rank: int) -> None:
    model = Masks()
    with torch.no_grad():
        model.gate.bias[-2:] = 100
    line = Placement.all("cpu")
    with consistent.report() as report:
        check(model, batch(), line, "expert")
    assert max(report.rows_of_experts.values()) == 12 * 3 * K
    last = line.size - 1
    assert f"Rank {last} got most rows for its experts, 72" in report.summary()


@on_ranks(3)
def test_tokens_that_are_no_numbers(rank: int) -> None:
    x = batch()
    x[2, 1] = torch.nan  # and so are its scores
    for kind in (Rows, Dims):
        check(kind(), x, Placement.all("cpu"), "expert")


@on_ranks(4)
def test_two_axes(rank: int) -> None:
    grid, x = Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "ep")), batch()
    plans = {"dp": "zero3", "ep": "expert"}, {"dp": "zero1", "ep": "zero2+expert"}
    for i, kind in enumerate((OneHot, Masks)):
        for k, plan in enumerate(plans):
            if ALL or i == k:
                assert check(kind(), x, grid, plan, (S(0), S(0))) == 12 * 3 * K // 2  # of this half
    assert check(Masks(), x, grid, plans[0], (S(0), B)) == 0
    grid = Placement("cpu", [[0, 1], [2, 3]], axes=("ep", "tp"))
    assert check(OneHot(), x, grid, {"ep": "zero3+expert", "tp": "tensor"}, (S(0), B)) == 0


@on_ranks(3)
def test_bytes_are_those_of_tokens_on_other_ranks(rank: int) -> None:
    line, size = Placement.all("cpu"), 3
    model: Any = consistent.parallelize(Rows(6), line, "expert")
    with torch.no_grad():  # all tokens choose the first two experts, which are rank 0's
        model.gate.bias[:2] = 100
    forward: ListForward = model.__dict__["forward"]
    calls = []
    for e, expert in enumerate(forward.experts):
        expert.register_forward_hook(lambda *_, e=e: calls.append(e))
    assert check_rows(model, line) == 0 and calls == list(range(6))  # hooks see each call
    for expert in forward.experts:
        expert._forward_hooks.clear()
    x = consistent.distribute(batch(), line, S(0)).requires_grad_()
    with counting() as there:
        out = model(x)
    with counting() as back:
        out.sum().backward()
    rows = 0 if rank == 0 else 4 * 3 * K * D * 8
    results = 0 if rank else 2 * 4 * 3 * K * D * 8
    counts = (size - 1) * (2 + 1 + size) * 8
    assert [c.bytes for c in there.calls if c.name == "all_to_all"] == [counts, rows, results]
    assert [c.bytes for c in back.calls if c.name == "all_to_all"][:2] == [rows, results]


def check_rows(model: nn.Module, line: Placement) -> int:
    with consistent.report() as report:
        model(consistent.distribute(batch(), line, S(0)))
    return sum(report.rows_of_experts.values())


@on_ranks(3)
def test_parameters_keep_their_names_and_each_is_on_one_rank(rank: int) -> None:
    line = Placement.all("cpu")
    plain = OneHot()
    model: Any = consistent.parallelize(copy.deepcopy(plain), line, "zero3+expert")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.experts[3].w1.weight.sbp == (S(0, sizes=(0, INNER, 0)),)
    full = consistent.checkpoint.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(full[name], value) if rank == 0 else name not in full
    twin = copy.deepcopy(model)
    assert twin.__dict__["forward"].experts[0] is twin.experts[0]
    consistent.move(model, None, line, "data")
    assert "forward" not in model.__dict__ and "forward" not in model.experts[0].__dict__


def _trained(model: nn.Module, x: Tensor) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for _ in range(3):
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(3)
def test_trains_as_one_process_does(rank: int) -> None:
    line = Placement.all("cpu")
    model = consistent.parallelize(Masks(), line, "zero3+expert")
    found = _trained(model, consistent.distribute(batch(), line, S(0)))
    assert found == pytest.approx(_trained(Masks(), batch()))


def _compiled(kind: type[Block]) -> Any:
    model = consistent.parallelize(kind(), Placement.all("cpu"), "zero3+expert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return run, list(model.parameters())


@on_ranks(3)
def test_a_compiled_step_has_one_message_each_way(rank: int) -> None:
    batches = [(consistent.distribute(batch() * i, Placement.all("cpu"), S(0)),) for i in (1, 2, 3)]
    for kind in (Rows, OneHot, Scattered, Greater):
        program = beside(partial(_compiled, kind), batches)
        kinds = [call.kind for call in program.programs[-1].program.messages()]
        assert kinds.count("as_one") == 2, (kind, kinds)


class Every(Block):
    """Each expert takes all tokens."""

    def mixed(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        full = torch.zeros(*h.shape[:-1], len(self.experts), dtype=h.dtype)
        full = full.scatter(-1, chosen, weights)
        return sum(expert(h) * full[:, e, None] for e, expert in enumerate(self.experts))  # type: ignore[return-value]


@on_ranks(3)
def test_lists_that_are_left_whole(rank: int) -> None:
    line = Placement.all("cpu")
    for model, why in ((Every(), "all tokens"), (Rows(2), "2 experts on 3 ranks are left whole")):
        check(model, batch(), line, "expert")
        assert why in consistent.plan_of(model).notes[0]
        assert model.experts[0].w1.weight.sbp == (B,)


class Stacked(nn.Module):
    """Holds experts as stacked weights. It is only planned."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: Any = nn.Module()
        self.experts.num_experts = COUNT
        self.experts.w1 = nn.Parameter(torch.ones(COUNT, INNER, D))
        self.gate = nn.Linear(D, COUNT)


@on_ranks(2)
def test_experts_that_are_global_before_stay_as_they_are(rank: int) -> None:
    line = Placement.all("cpu")
    for plan in ("expert", "zero3+expert", "tensor"):
        model: Any = Rows()
        consistent.parallelize(model.experts[0], line, "data")
        check(model, batch(), line, plan)
        assert model.experts[0].w1.weight.sbp == (B,)
        if plan == "expert":
            assert "some of these experts are global already" in str(consistent.plan_of(model))
        stacked = Stacked()
        consistent.parallelize(stacked.experts, line, "data")
        consistent.parallelize(stacked, line, plan)
        assert stacked.experts.w1.sbp == (B,)


@on_ranks(2)
def test_experts_that_draw_random_numbers_run_one_by_one(rank: int) -> None:
    line = Placement.all("cpu")
    model: Any = Rows()
    for expert in model.experts:
        expert.w1 = nn.Sequential(expert.w1, nn.Dropout(0.5))
    consistent.parallelize(model.train(), line, "expert")
    assert check_rows(model, line) == 0
    assert check_rows(model.eval(), line) == 12 * 3 * K


class Summed(Block):
    """Weights multiply results in their own dtype; three experts for each token."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        weights, chosen = self.gate(h).float().softmax(-1).topk(3)
        weights = weights.to(self.weights_in)  # type: ignore[arg-type]
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            made = expert(h[at]) * weights[at, slot, None]
            out.index_add_(0, at, made.to(h.dtype))
        return out.view(x.shape)


@on_ranks(2, 3)
@pytest.mark.parametrize("weights_in", [torch.float32, torch.bfloat16])
def test_sums_under_autocast_are_rounded_as_in_one_process(
    rank: int, weights_in: torch.dtype
) -> None:
    model: Any = Summed().float().eval()
    model.weights_in = weights_in
    x, line = batch().float(), Placement.all("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = step(copy.deepcopy(model), x)
        consistent.parallelize(model, line, "expert")
        with consistent.report() as report:
            found = step(model, consistent.distribute(x, line, S(0)))
    assert sum(report.rows_of_experts.values()) == 12 * 3 * 3
    assert found["out"].dtype is torch.float32
    # The sums have the same bits, which numbers of bfloat16 would not have.
    assert torch.equal(found["out"].full(), wanted["out"])
    assert not torch.equal(wanted["out"], wanted["out"].bfloat16().float())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].full(), value, rtol=0.02, atol=0.02)
