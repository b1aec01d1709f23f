"""Messages fused with the ops beside them: programs before and after, values and gradients, what is
left as it is, and that all ranks of a message decide alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, P, Placement, S
from consistent.compiled.fused.worth import is_fused_sum_faster
from tests.consistent.compiled.steps import beside
from tests.ranks import ON_ONE_AXIS, on_ranks, pool
from tests.twins import randn

ROWS, COLUMNS = 7, 6
Tail = Callable[[Any, Any, Any, Any], Any]  # (sum, bias, residual, weight)


def ops(text: str) -> list[str]:
    """The ops and messages of a program that is shown."""
    return re.findall(r"^  %\d+ = (message [a-z_, ]+|[a-z_]+)\(", text, re.MULTILINE)


def both(step: Callable[..., Any], *args: Any, dtype: Any = None) -> list[list[str]]:
    """The ops of the program as it is and of the fused one, which have the values of the step."""
    wanted, found = [x.full() for x in step(*args)], []
    close: Any = {} if dtype is None else {"rtol": 2e-2, "atol": 2e-2}
    for fuse in (False, True):
        made: Any = consistent.compile(step, backend="ops", fullgraph=True, fuse=fuse)
        for _ in range(4):
            for ours, theirs in zip(made(*args), wanted, strict=True):
                torch.testing.assert_close(ours.full(), theirs, **close)
        found.append(ops(made.show()))
    return found


def given(target: Any, dtype: Any = torch.float64) -> list[Any]:
    """x that is P, and bias, residual and weight beside its sum."""
    p = Placement.all("cpu")
    local = randn(ROWS, COLUMNS, seed=torch.distributed.get_rank()).to(dtype)
    x: Any = consistent.from_local(local, p, P)
    bias, weight = (consistent.distribute(randn(COLUMNS, seed=i).to(dtype), p, B) for i in (8, 9))
    return [
        x,
        bias,
        consistent.distribute(randn(ROWS, COLUMNS, seed=7).to(dtype), p, target),
        weight,
    ]


TAILS: dict[str, tuple[Tail, list[str]]] = {
    "scale": (lambda y, b, r, w: y * 0.5, ["mul"]),
    "scale, residual": (lambda y, b, r, w: r + y / 4, ["div", "add"]),
    "bias": (lambda y, b, r, w: y + b, ["add"]),
    "bias, residual": (lambda y, b, r, w: b + y + r, ["add", "add"]),
    "relu": (lambda y, b, r, w: torch.relu(y), ["relu"]),
    "bias, gelu": (lambda y, b, r, w: F.gelu(y + b), ["add", "gelu"]),
    "gelu_tanh": (lambda y, b, r, w: F.gelu(y, approximate="tanh"), ["gelu"]),
    "scale, bias, residual, silu": (
        lambda y, b, r, w: F.silu(y * 3 + b + r),
        ["mul", "add", "add", "silu"],
    ),
    "layer_norm": (lambda y, b, r, w: F.layer_norm(y, (COLUMNS,), w, b), ["native_layer_norm"]),
    "residual, layer_norm": (
        lambda y, b, r, w: F.layer_norm(y + r, (COLUMNS,)),
        ["add", "native_layer_norm"],
    ),
    "rms_norm": (
        lambda y, b, r, w: F.rms_norm(y, (COLUMNS,), w, 1e-5),
        ["pow", "mean", "add_", "rsqrt", "mul", "mul"],
    ),
    "bias, relu, rms_norm": (
        lambda y, b, r, w: F.rms_norm(torch.relu(y + b), (COLUMNS,), None, 1e-5),
        ["add", "relu", "pow", "mean", "add_", "rsqrt", "mul"],
    ),
}


@on_ranks(2)
def test_a_norm_over_other_dims_than_the_last_is_left(rank: int) -> None:
    def step(x: Any, b: Any, r: Any, w: Any) -> Any:
        y = x.to_global(sbp=B)
        mean = y.pow(2).mean([0], True)
        mean.add_(1e-5)
        return (y * torch.rsqrt(mean),)

    with torch.no_grad():
        before, after = both(step, *given(B))
    assert before == after == ["message all_reduce", "pow", "mean", "add_", "rsqrt", "mul"]


@pytest.mark.parametrize("target", [B, S(0)])
@on_ranks(2, 3, 4)
def test_a_sum_and_what_follows_it(rank: int, target: Any) -> None:
    move = "message all_reduce" if target is B else "message reduce_scatter"
    with torch.no_grad():
        for name, (tail, separate) in TAILS.items():

            def step(x: Any, b: Any, r: Any, w: Any, tail: Tail = tail) -> Any:
                return (tail(x.to_global(sbp=target), b, r, w),)

            before, after = both(step, *given(target))
            assert before == [move, *separate], name
            assert after == [f"{move}, {name}"], name


@on_ranks(2)
def test_bfloat16_is_cast_by_the_sum(rank: int) -> None:
    def step(x: Any, b: Any, r: Any, w: Any) -> Any:
        return (F.gelu(x.to_global(sbp=B) + b).float(),)

    with torch.no_grad():
        before, after = both(step, *given(B, torch.bfloat16), dtype=torch.bfloat16)
    assert before == ["message all_reduce", "add", "gelu", "_to_copy"]
    assert after == ["message all_reduce, bias, gelu, cast"]


@on_ranks(2, 3)
def test_gradients_read_the_total(rank: int) -> None:
    """Backward of gelu reads what gelu was given, and that of a norm reads the sums of rows, which
    the kernel does not give."""

    def step(x: Any, b: Any, r: Any, w: Any) -> Any:
        x, b = x.detach().requires_grad_(), b.detach().requires_grad_()
        y = F.gelu(x.to_global(sbp=S(0)) + b)
        F.layer_norm(y * r, (COLUMNS,), w).square().sum().backward()
        return y, x.grad, b.grad

    before, after = both(step, *given(S(0)))
    assert before[:3] == ["message reduce_scatter", "add", "gelu"]
    assert after[0] == "message reduce_scatter, bias, gelu"
    assert after[1:] == before[3:], "the rest is as it was"
    assert "gelu_backward" in after and "native_layer_norm" in after


# step of (x split along columns, x split along rows, w split along rows, w split along columns),
# and its ops before and after
PRODUCTS: list[tuple[Callable[..., Any], list[str], list[str]]] = [
    (
        lambda x, xs, w, wc: ((x @ w).to_global(sbp=B),),
        ["mm", "message all_reduce"],
        ["message mm, all_reduce"],
    ),
    (
        lambda x, xs, w, wc: ((x @ w).to_global(sbp=S(0)),),
        ["mm", "message reduce_scatter"],
        ["message mm, reduce_scatter"],
    ),
    (
        lambda x, xs, w, wc: (torch.tanh(xs.to_global(sbp=B) @ wc),),
        ["message all_gather_into_tensor", "mm", "tanh"],
        ["message all_gather, mm", "tanh"],
    ),
    (  # a bias that is an addend, three dims, and a weight that is turned
        lambda x, xs, w, wc: (F.linear(x.view(4, 3, 8), w.t(), w.sum(0)).to_global(sbp=B),),
        ["sum", "addmm", "view", "message all_reduce"],
        ["sum", "message addmm, all_reduce"],
    ),
]


@on_ranks(2, 3, 4)
def test_products(rank: int) -> None:
    p = Placement.all("cpu")
    x, xs = (consistent.distribute(randn(12, 8), p, S(dim)) for dim in (1, 0))
    w, wc = (consistent.distribute(randn(8, 5, seed=1), p, S(dim)) for dim in (0, 1))
    with torch.no_grad():
        for step, *wanted in PRODUCTS:
            found = both(step, x, xs, w, wc)
            found[0] = ["view" if op == "_unsafe_view" else op for op in found[0]]  # torch 2.15's
            assert found == wanted, found


@on_ranks(2)
def test_what_is_left_as_it_is(rank: int) -> None:
    def read_twice(x: Any, b: Any, r: Any, w: Any) -> Any:
        y = x.to_global(sbp=B)
        return y + b, y * 2

    def written(x: Any, b: Any, r: Any, w: Any) -> Any:
        y = x.to_global(sbp=B)
        z = y * 2
        y.add_(1)
        return z, y

    def written_between(x: Any, b: Any, r: Any, w: Any) -> Any:
        other = r * 1
        y = x.to_global(sbp=B)
        other.mul_(2)
        return (y + other,)

    def made_later(x: Any, b: Any, r: Any, w: Any) -> Any:
        y = x.to_global(sbp=B)
        return (y + torch.tanh(r),)

    def returned(x: Any, b: Any, r: Any, w: Any) -> Any:
        y = x.to_global(sbp=B)
        return y, y + b

    def largest(x: Any, b: Any, r: Any, w: Any) -> Any:
        return ((r.to_global(sbp=S(0)) * 1).amax(0).to_global(sbp=B) * 2,)

    def after_a_message(x: Any, b: Any, r: Any, w: Any) -> Any:
        y, z = x.to_global(sbp=B), (x * 2).to_global(sbp=B)
        return torch.tanh(z), torch.relu(y)

    def other_columns(x: Any, b: Any, r: Any, w: Any) -> Any:
        return (F.layer_norm(x.to_global(sbp=S(1)).to_global(sbp=B), (ROWS, COLUMNS)),)

    with torch.no_grad():
        for step in (read_twice, written, written_between, made_later, returned, largest,
                     after_a_message, other_columns):  # fmt: skip
            before, after = both(step, *given(B))
            assert after == before, step.__name__


@on_ranks(2)
def test_two_sums_meet_in_one_add(rank: int) -> None:
    def step(x: Any, b: Any, r: Any, w: Any) -> Any:
        y = torch.tanh(x.to_global(sbp=S(0)))
        return (torch.relu(y.to_global(sbp=B).sum(0, keepdim=True) + b),
                x.amin(0).sum() + (x * 3).to_global(sbp=S(0)) + y)  # fmt: skip

    with torch.no_grad():
        both(step, *given(B))


@on_ranks(3, 4)
def test_all_ranks_of_a_message_decide_alike(rank: int) -> None:
    """A sum of one row leaves most ranks none, and one axis of two boxes apart from the other."""
    p = Placement.all("cpu")

    def few(x: Any, b: Any) -> Any:
        return (F.rms_norm(F.gelu(x.to_global(sbp=S(0)) + b), (COLUMNS,), None, 1e-5),)

    b = consistent.distribute(randn(COLUMNS), p, B)
    x = consistent.from_local(randn(1, COLUMNS, seed=rank), p, P)
    with torch.no_grad():
        both(few, x, b)
    inside = Placement("cpu", range(2))
    local = randn(4, COLUMNS, seed=rank) if rank < 2 else torch.empty(4, COLUMNS).double()
    y = consistent.from_local(local if rank < 2 else local.to("meta"), inside, P)
    c = consistent.distribute(randn(COLUMNS), inside, B)
    with torch.no_grad():
        before, after = both(few, y, c)
    assert after == ["message reduce_scatter, bias, gelu, rms_norm"] or rank > 1


@on_ranks(4)
def test_two_axes(rank: int) -> None:
    p = Placement("cpu", [[0, 1], [2, 3]])
    x = consistent.distribute(randn(7, 8), p, (S(0), S(1)))
    w = consistent.distribute(randn(8, 5, seed=1), p, (B, S(0)))
    b = consistent.distribute(randn(5, seed=2), p, (B, B))

    def step(x: Any, w: Any, b: Any) -> Any:
        y = torch.relu((torch.einsum("ij,jk->ik", x, w) * 1).to_global(sbp=(S(0), B)) + b)
        return y, (x @ w).to_global(sbp=(S(0), B))

    with torch.no_grad():
        _, after = both(step, x, w, b)
    assert "message all_reduce, bias, relu" in after
    assert "message mm, all_reduce" in after


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(18, 6)

    def forward(self, x: Any) -> Any:
        return torch.relu(x + self.down(F.gelu(self.up(self.norm(x)))))


def _trained(rank: int, plan: Any, backend: str, blocks: int, optimizer: str | None) -> str:
    p = Placement.all("cpu")

    def make() -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block() for _ in range(blocks))).double()
        consistent.parallelize(model, p, plan)
        optim = optimizer and getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)

        def step(x: Any) -> Any:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if optim:
                optim.step()
            return loss

        return step, [model, optim]

    split = B if plan in ("tensor", "tensor+sequence") else S(0)
    batches = [(consistent.distribute(randn(4, 5, 6, seed=i), p, split),) for i in range(4)]
    return beside(make, batches, backend, fuse=True).show()


@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
@pytest.mark.parametrize("plan", ["tensor", "tensor+sequence", "zero3"])
def test_training(plan: str, ranks: int) -> None:
    for text in pool(ranks).run(_trained, plan, "ops", 2, "AdamW"):
        kinds = re.findall(r"message ([a-z_, ]+)\(", text)
        fused = [kind for kind in kinds if ", " in kind]
        assert bool(fused) == (plan != "zero3"), text


def test_training_by_inductor() -> None:
    for text in pool(2).run(_trained, "tensor", "inductor", 1, None, timeout=300):
        assert "message addmm, all_reduce(" in text, text


def test_what_wins_on_the_cpu_is_what_was_measured() -> None:
    def wins(ops: tuple[str, ...], kib: int, dtype: torch.dtype, one_by_one: bool = True) -> bool:
        return is_fused_sum_faster(
            "all_reduce", ops, kib << 10, dtype, 2, "cpu", one_by_one=one_by_one, shared=True
        )

    assert wins(("rms_norm",), 256, torch.float32)
    assert not wins(("rms_norm",), 255, torch.float32)
    assert not wins(("rms_norm",), 256, torch.float32, one_by_one=False)
    assert not wins(("rms_norm",), 4096, torch.bfloat16)
    assert wins(("bias", "gelu"), 1024, torch.bfloat16)
    assert not wins(("bias", "gelu"), 1024, torch.float32)
    assert not wins(("relu",), 4096, torch.float32)


def test_what_wins_on_cuda_follows_from_costs() -> None:
    def wins(kind: str, mib: int, ranks: int, ops: tuple = ("gelu",), **how: bool) -> bool:
        how = {"one_by_one": True, "shared": True, **how}
        return is_fused_sum_faster(kind, ops, mib << 20, torch.float32, ranks, "cuda", **how)

    assert wins("reduce_scatter", 64, 8)
    assert wins("all_reduce", 1, 2)
    assert not wins("all_reduce", 64, 8), "each rank would read what all have"
    assert not wins("all_reduce", 1, 2, shared=False), "one kernel after the message, as before"
    assert wins("all_reduce", 1, 2, ("bias", "gelu"), shared=False)
    assert not wins("all_reduce", 1, 2, ("bias", "gelu"), shared=False, one_by_one=False)


@on_ranks(2)
def test_by_default_it_is_done_where_it_wins(rank: int) -> None:
    p = Placement.all("cpu")

    def step(x: Any, y: Any) -> Any:
        large = F.rms_norm(x.to_global(sbp=B), (256,), None, 1e-5)
        return large, F.rms_norm(y.to_global(sbp=B), (256,), None, 1e-5)

    x, y = (consistent.from_local(torch.randn(n, 256), p, P) for n in (256, 128))
    with torch.no_grad():
        made: Any = consistent.compile(step, backend="ops", fullgraph=True)
        for _ in range(3):
            made(x, y)
    kinds = [c.kind for c in made.programs[0].program.messages()]
    assert kinds == ["all_reduce, rms_norm", "all_reduce"]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match='Give True, False or "auto"'):
        consistent.compile(lambda x: x, fuse="yes")  # type: ignore[arg-type]
