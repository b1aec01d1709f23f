"""A mixture whose tokens are sent to their experts makes what one process makes, and gradients too;
it sends each token to the ranks of its experts and back, and no more."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S
from consistent.nn.experts.forward import ExpertsForward
from mirrored.transports.counting import counting
from tests.ranks import SIZES, on_ranks

D, INNER = 4, 6


class Loop(nn.Module):
    """One expert after the other, as many as it says that it has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count

    def expert(self, e: int, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for e in range(self.num_experts):
            at, slot = torch.where(index == e)
            out = out.index_add(0, at, self.expert(e, tokens[at]) * weights[at, slot, None])
        return out


class Experts(Loop):
    """Two layers each."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.up = nn.Parameter(torch.randn(count, INNER, D))
        self.down = nn.Parameter(torch.randn(count, D, INNER))
        self.bias = nn.Parameter(torch.randn(count, D))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.up[e].T) @ self.down[e].T + self.bias[e]


class Mixture(nn.Module):
    """Scores by softmax or sigmoid, the best ``k`` of them, and a loss on how even they are."""

    def __init__(self, count: int, k: int = 2, score: Any = torch.sigmoid) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.k, self.score = k, score
        self.router = nn.Linear(D, count)
        self.experts: Any = Experts(count)
        self.shared = nn.Linear(D, D)
        self.drop = False  # the second choice of every token
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(self.router(x))
        weights, index = scores.topk(self.k, -1)
        if self.drop:
            last = torch.arange(self.k) == self.k - 1
            index = index.masked_fill(last, self.experts.num_experts)
            weights = weights.masked_fill(last, torch.nan)  # does not count
        made = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return made.unflatten(0, x.shape[:2]) + self.shared(x), scores.square().mean((0, 1)).sum()


def batch(size: int = 7) -> Tensor:
    return torch.randn(size, 3, D, dtype=torch.float64, generator=torch.manual_seed(5))


def step(model: nn.Module, x: Tensor) -> dict[str, Any]:
    x = x.detach().requires_grad_()
    out, even = model(x)
    # No sum is left for later, so that a gradient is no mere row of ones.
    (out * torch.linspace(-1, 1, D, dtype=x.dtype)).sum().add(even).backward()
    return {"out": out, "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def check(model: Mixture, x: Tensor, placement: Placement, plan: Any, sbp: Any = None) -> None:
    """A step under ``plan`` gives what a plain copy's gives."""
    wanted = step(copy.deepcopy(model), x)
    consistent.parallelize(model, placement, plan)
    found = step(model, consistent.distribute(x, placement, sbp or S(0)))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].full(), value, equal_nan=True)


softmax = nn.Softmax(-1)


def lopsided(to: int) -> Mixture:
    """All tokens choose one expert, and none any other."""
    model = Mixture(5, 1)
    with torch.no_grad():
        model.router.bias[to] = 100
    return model


@on_ranks(*SIZES)
def test_a_step_is_that_of_one_process(rank: int) -> None:
    line = Placement.all("cpu")
    check(Mixture(12), batch(), line, "expert")
    check(Mixture(5, 1, softmax), batch(), line, "zero3+expert")  # uneven experts
    check(Mixture(8, 8, softmax), batch(), line, "zero2+expert")
    check(Mixture(6), batch(2), line, "expert")  # a rank without tokens
    check(lopsided(0), batch(), line, "expert")
    check(lopsided(4), batch(), line, "zero1+expert")
    check(Mixture(6, 3, softmax), batch(), line, "expert", B)


@on_ranks(3)
def test_tokens_that_are_no_numbers_or_dropped(rank: int) -> None:
    line = Placement.all("cpu")
    x = batch()
    x[2, 1] = torch.nan  # and so are its scores
    check(Mixture(6, 2, softmax), x, line, "expert")
    model = Mixture(6)
    model.drop = True
    check(model, batch(), line, "expert")


@on_ranks(4)
def test_experts_on_one_of_two_axes(rank: int) -> None:
    grid = Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "ep"))
    plan = {"dp": "zero3", "ep": "expert"}
    check(Mixture(5), batch(), grid, plan, (S(0), S(0)))
    check(Mixture(5), batch(), grid, plan, (S(0), B))
    check(Mixture(5), batch(), grid, plan, (B, S(1)))
    check(Mixture(5), batch(), grid, {"dp": "expert", "ep": "zero3+expert"}, (S(0), S(0)))


class Gated(Loop):
    """Experts with a gate, under the names that the plan "tensor" knows."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * INNER, D))
        self.down_proj = nn.Parameter(torch.randn(count, D, INNER))
        self.down_proj_bias = nn.Parameter(torch.randn(count, D))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ self.gate_up_proj[e].T).chunk(2, -1)
        return (gate.sigmoid() * up) @ self.down_proj[e].T + self.down_proj_bias[e]


def gated(count: int, k: int = 2) -> Mixture:
    model = Mixture(count, k)
    model.experts = Gated(count).double()
    return model


@on_ranks(4)
def test_experts_that_another_axis_splits_inside(rank: int) -> None:
    grid = Placement("cpu", [[0, 1], [2, 3]], axes=("ep", "tp"))
    plan = {"ep": "zero3+expert", "tp": "tensor"}
    for model, size in ((gated(5), 7), (gated(6, 1), 1)):  # of one row, a rank has no tokens
        with consistent.report() as found:
            check(model, batch(size), grid, plan, (S(0), B))
        assert sum(found.rows_of_experts.values()) == size * 3 * model.k
    check(gated(5), batch(), grid, plan, (S(0), S(1)))  # tokens split along both
    with consistent.report() as found:
        check(gated(5), batch(), grid, plan, (B, B))
    assert not found.rows_of_experts  # none are sent


@on_ranks(*SIZES)
def test_bytes_are_those_of_tokens_on_other_ranks(rank: int) -> None:
    k, size = 2, torch.distributed.get_world_size()
    model: Any = consistent.parallelize(Mixture(2 * size, k), Placement.all("cpu"), "expert")
    each = 2 * size  # tokens of a rank, of which every rank's experts get two
    tokens = each * size
    x = consistent.distribute(torch.randn(tokens, D).double(), Placement.all("cpu"), S(0))
    chosen = torch.arange(tokens)[:, None] * 2 % (2 * size) + torch.arange(k)
    index = consistent.distribute(chosen, Placement.all("cpu"), S(0))
    x.requires_grad_()
    weights = torch.ones_like(index, dtype=x.dtype)
    with counting() as there:
        out = model.experts(x, index, weights)
    with counting() as back:
        out.sum().backward()
    rows = each * k * (size - 1) // size * D * 8
    counts = (size - 1) * (2 + 1 + size) * 8  # of its experts, wrong ones, and by rank
    assert [(c.name, c.bytes) for c in there.calls] == [
        ("all_to_all", counts), ("all_to_all", rows), ("all_to_all", rows)
    ]  # fmt: skip
    assert [(c.name, c.bytes) for c in back.calls] == [("all_to_all", rows)] * 2


@on_ranks(*SIZES)
def test_a_report_names_the_rank_with_most_rows(rank: int) -> None:
    line = Placement.all("cpu")
    model: Any = consistent.parallelize(Mixture(2 * line.size), line, "expert")
    tokens = 4 * line.size
    x = consistent.distribute(torch.randn(tokens, D).double(), line, S(0))
    chosen = torch.full((tokens, 2), 2 * line.size - 1)  # all are the last rank's
    chosen[:1, 0] = 0
    index = consistent.distribute(chosen, line, S(0))
    with consistent.report() as found:
        model.experts(x, index, torch.ones_like(index, dtype=x.dtype))
    last, all_rows = line.size - 1, 2 * tokens
    assert found.rows_of_experts == Counter({last: all_rows - 1, 0: 1})
    said = f"Rank {last} got most rows for its experts, {all_rows - 1}, which is "
    assert said in found.summary() and said in str(found)


@on_ranks(3)
def test_an_index_that_is_none_of_the_experts_is_an_error_on_every_rank(rank: int) -> None:
    model = Mixture(6)
    consistent.parallelize(model, Placement.all("cpu"), "expert")
    given = torch.zeros(6, 2, dtype=torch.int64)
    given[5, 1] = 7
    line = Placement.all("cpu")
    x = consistent.distribute(torch.randn(6, D).double(), line, S(0))
    index = consistent.distribute(given, line, S(0))
    with pytest.raises(ValueError, match="1 indices on rank 2 are none of the 6 experts"):
        model.experts(x, index, torch.ones_like(index, dtype=x.dtype))
    check(Mixture(6), batch(), line, "expert")  # and the next call is as if nothing had been


@on_ranks(3)
def test_what_cannot_be_sent_runs_op_by_op(rank: int) -> None:
    model = Mixture(2)
    check(model, batch(), Placement.all("cpu"), "expert")  # fewer experts than ranks
    assert "2 experts on 3 ranks" in consistent.plan_of(model).notes[0]
    assert "forward" not in model.experts.__dict__


@on_ranks(2)
def test_it_is_copied_taken_off_and_moved(rank: int) -> None:
    line = Placement.all("cpu")
    model = consistent.parallelize(Mixture(6), line, "zero3+expert")
    twin = copy.deepcopy(model)
    assert isinstance(twin.experts.__dict__["forward"], ExpertsForward)
    assert twin.experts.__dict__["forward"].module is twin.experts
    consistent.move(model, None, line, "data")
    assert "forward" not in model.experts.__dict__
