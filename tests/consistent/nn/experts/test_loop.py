"""Loops over experts that write to what an expert takes or gives, or pass it on in ways that are no
calls of torch's functions, give what they give in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import B, Placement, S
from consistent.nn.experts.list_forward import ListForward
from tests.ranks import on_ranks

from .test_list_forward import (
    COUNT,
    SENT,
    Block,
    D,
    Expert,
    K,
    Rows,
    batch,
    check,
    check_rows,
    step,
)

# (expert, tokens, sum, indices, weights) -> the sum after this expert
Body = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


class Half(torch.autograd.Function):
    """The identity, whose gradient is halved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 0.5


class HalfInTwoParts(Half):
    """The same, whose forward gets no context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class HalfDecorated(Half):
    """The same, whose forward is wrapped, as those of mixed precision are."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0


class Loop(Block):
    def __init__(self, body: Body, after: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        super().__init__()
        self.body, self.after = body, after

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        weights, chosen = self.gate(h).softmax(-1).topk(K)
        h, out = h * 1.0, torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            out = self.body(expert, h, out, at, weights[at, slot, None])
        return self.after(out).view(x.shape)


def scaled_in_place(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    made = expert(h[at])
    made.mul_(weight)
    return out.index_add_(0, at, made)


def cut(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    made = expert(h[at])
    made[:, 0].mul_(3)
    made[:, 1] = 0
    return out.index_add_(0, at, made)


def two_names(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    made = other = expert(h[at])
    made *= 0.5
    return out.index_add_(0, at, other)


def rows_in_place(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    rows = h[at]
    rows.mul_(2)
    return out.index_add_(0, at, expert(rows))


def rows_replaced(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    rows = h[at]
    rows.data = rows.data * 2
    return out.index_add_(0, at, expert(rows))


def hooked(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    made = expert(h[at])
    made.register_hook(lambda grad: grad * 0.5)
    return out.index_add_(0, at, made * weight)


def before_kept(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    before = out[at]
    out[at] = before + expert(h[at])
    return out + before.sum() * 1e-3


def before_added(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    before = out[at]
    out[at] = before + expert(h[at])
    out[at] += before * 0.5
    return out


def weighted(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    return out.index_add_(0, at, expert(h[at]) * weight)


def boxed(out: Any) -> Any:
    return out.to_global(sbp=B) if hasattr(out, "to_global") else out


WRITING = (
    scaled_in_place, cut, two_names, rows_in_place, rows_replaced, hooked, before_kept, before_added
)  # fmt: skip
AFTER = (boxed, Half.apply, lambda out: checkpoint(torch.sin, out, use_reentrant=True))


class Applied(Rows):
    """Functions get the rows and results themselves."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        weights, chosen = self.gate(h).softmax(-1).topk(K)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            made = Half.apply(checkpoint(expert, h[at], use_reentrant=True))
            out.index_add_(0, at, made * weights[at, slot, None])  # type: ignore[operator]
        return out.view(x.shape)


class Constant(Rows):
    """Weights are a plain tensor that no router makes."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.view(-1, D), torch.zeros_like(x.view(-1, D))
        chosen = self.gate(h).topk(K)[1]
        weights = torch.linspace(0, 1, len(h) * K, dtype=h.dtype).view(len(h), K, 1, 1)
        for e, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == e)
            out.index_add_(0, at, expert(h[at]) * weights[at, slot].reshape(-1, 1))
        return out.view(x.shape)


@on_ranks(3)
def test_what_an_expert_takes_and_gives_may_be_written_and_passed_on(rank: int) -> None:
    x, line = batch(), Placement.all("cpu")
    models = [Loop(body) for body in WRITING] + [Loop(weighted, after) for after in AFTER]
    for model in (*models, Applied(), Constant()):
        check(model, x, line, "expert")
        assert isinstance(model.__dict__["forward"], ListForward)


def applied_to_rows(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    return out.index_add_(0, at, expert(Half.apply(h[at])) * weight)


def applied_to_result(function: Any, expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    return out.index_add_(0, at, function.apply(expert(h[at])) * weight)


def applied_to_copy(expert: Any, h: Any, out: Any, at: Any, weight: Any) -> Any:
    return out.index_add_(0, at, Half.apply(expert(h[at]).clone()) * weight)


@on_ranks(2)
def test_functions_that_other_modules_apply_say_that_gradients_would_be_lost(rank: int) -> None:
    x, line = batch(), Placement.all("cpu")
    kinds = (Half, HalfInTwoParts, HalfDecorated)
    for body in (applied_to_rows, *(partial(applied_to_result, kind) for kind in kinds)):
        model = consistent.parallelize(Loop(body), line, "expert")
        with pytest.raises(RuntimeError, match=r"MyFunction\.apply\(x\.clone\(\)\)"):
            model(consistent.distribute(x, line, S(0)))
    check(Loop(applied_to_copy), x, line, "expert")


class Early(Expert):
    """Makes a tensor apart from the graph if it has no rows; it never uses one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) else x.new_zeros(0, D)


@on_ranks(3)
def test_all_ranks_have_gradients_of_an_expert_that_leaves_something_out(rank: int) -> None:
    plain = Rows()
    plain.experts = nn.ModuleList(Early() for _ in range(COUNT)).double()
    with torch.no_grad():
        plain.gate.bias[-2:] = 100  # the other ranks get no rows
    model: Any = consistent.parallelize(copy.deepcopy(plain), Placement.all("cpu"), "expert")
    wanted = step(plain, batch())
    found = step(model, consistent.distribute(batch(), Placement.all("cpu"), S(0)))
    for name, value in wanted.items():
        zeros = torch.zeros(found[name].shape, dtype=torch.float64)
        torch.testing.assert_close(found[name].full(), zeros if value is None else value)


class Dropping(Expert):
    dropout = 0.5  # a number, as in many configurations

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.dropout, self.training)


@on_ranks(2)
def test_experts_that_call_dropout_run_one_by_one(rank: int) -> None:
    line, model = Placement.all("cpu"), SENT[0]()
    model.experts = nn.ModuleList(Dropping() for _ in range(COUNT)).double()
    assert check_rows(consistent.parallelize(model.train(), line, "expert"), line) == 0
