"""``out=`` of whatever dtype holds what torch writes into it, or raises where torch does.

Every schema of aten that takes an ``out`` is called with one of two dtypes, one of which takes more
values than the other, with arguments made from the schema.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import consistent
from consistent import B, P, Placement, S
from tests.consistent.dispatch.planning.test_writes import CASES, drawn, lay
from tests.ranks import ALL, on_ranks, simulate

# An op is called with the first two or the last two, in turn.
DTYPES = (torch.float32, torch.int64, torch.complex128, torch.bool)
# Of these torch reads or writes beyond the arguments, chooses among equals, or gives what has no
# memory.
NOT_CALLED = frozenset(
    """_stack.out _logcumsumexp.out
    _weight_norm_interface_backward.out topk.values _efficientzerotensor.out""".split()
)
Case = tuple[str, str, list, dict, list]


def _cases(part: int, parts: int) -> list[Case]:
    """One call of each op, and the tensors that it gives."""
    found = []
    for name, overload in CASES[part::parts]:
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        called = f"{name}.{overload}" not in NOT_CALLED
        if called and any(a.is_out for a in schema.arguments):
            given = next(drawn(name, overload), None)
            found += [] if given is None else [(name, overload, *given)]
    return found


def _differences(rank: int, cases: list[Case]) -> list[str]:
    warnings.simplefilter("ignore")
    placement, wrong = Placement("cpu", [0, 1]), []
    for number, (name, overload, *given) in enumerate(cases):
        for dtype in DTYPES if ALL else (DTYPES[:2], DTYPES[2:])[number % 2]:
            fault = _difference(name, overload, given, dtype, placement, rank)
            if fault:
                wrong.append(f"{name}.{overload} into {dtype}: {fault}")
    return wrong


def _difference(
    name: str, overload: str, given: Any, dtype: torch.dtype, placement: Placement, rank: int
) -> str:
    function = getattr(getattr(torch.ops.aten, name), overload)
    names = [a.name for a in function._schema.arguments if a.is_out]
    args, kwargs, outs = tree_map(lambda x: x.clone() if _is_tensor(x) else x, tuple(given))
    outs = [torch.zeros(x.shape, dtype=dtype) for x in outs]
    mine = tree_map(lambda x: lay(x, S(0), placement, rank), (args, kwargs, outs))
    wanted = _outcome(function, args, kwargs, dict(zip(names, outs, strict=True)))
    ours = _outcome(function, mine[0], mine[1], dict(zip(names, mine[2], strict=True)))
    if isinstance(wanted, str) or isinstance(ours, str):
        return "" if isinstance(wanted, str) and isinstance(ours, str) else f"{ours}, not {wanted}"
    for a, b in zip(wanted, ours, strict=True):
        if not torch.allclose(b.full(), a, rtol=1e-5, atol=1e-7, equal_nan=True):
            return f"{b.full().flatten()[:4].tolist()}, not {a.flatten()[:4].tolist()}"
    return ""


def _outcome(function: Any, args: Any, kwargs: dict, outs: dict) -> Any:
    """The tensors in ``outs`` once they are written, or the error; to resize one is one of ours."""
    shapes = [x.shape for x in outs.values()]
    try:
        function(*args, **kwargs, **outs)
    except Exception as error:  # noqa: BLE001  (torch says no in many ways)
        return f"raises {type(error).__name__}: {str(error)[:150]}"
    return list(outs.values()) if shapes == [x.shape for x in outs.values()] else "resizes"


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


@pytest.mark.parametrize("part", range(4))
def test_an_out_of_any_dtype_holds_what_torch_writes_or_raises(part: int) -> None:
    cases = _cases(part, 4)
    wrong = simulate(_differences, 2, cases)[0]
    assert not wrong, "\n".join(wrong)


@on_ranks(2, 3)
def test_one_call_after_the_other_meets_outs_of_other_dtypes(rank: int) -> None:
    full = torch.full((8, 4), 30000.0, dtype=torch.half)
    for ranks in ([0, 1], [1]):
        placement = Placement("cpu", ranks)
        for sbp in (S(0), B, P):
            for dtype in (torch.half, torch.float32, torch.float64, torch.int64):
                for into in (S(0), B, P):
                    x = consistent.distribute(full / 2, placement, sbp)
                    out = consistent.distribute(torch.zeros(4, dtype=dtype), placement, into)
                    wanted = torch.sum(full / 2, 0, out=torch.zeros(4, dtype=dtype))
                    assert torch.sum(x, 0, out=out) is out
                    assert out.full().tolist() == wanted.tolist()


@on_ranks(3)
def test_what_torch_refuses_raises_on_every_rank(rank: int) -> None:
    placement = Placement("cpu", [0, 1])

    def made(x: torch.Tensor) -> Any:
        return consistent.distribute(x, placement, S(0))

    x, number = made(torch.rand(4, 4)), made(torch.zeros(4, 4).long())
    with pytest.raises(
        RuntimeError, match="(?s)add: out is i64.* Give an out of the result's dtype"
    ):
        torch.add(x, x, out=number)
    with pytest.raises(RuntimeError, match="argmax: out is f32"):
        torch.argmax(x, 1, out=made(torch.zeros(4)))
    with pytest.raises(RuntimeError, match="max: out is "):
        torch.max(x, 1, out=(made(torch.zeros(4)), made(torch.zeros(4))))
    for function in (torch.sum, torch.cumsum):
        with pytest.raises(RuntimeError, match="the result has shape"):
            function(x, 1, out=made(torch.zeros(7).long()))
    values, places = made(torch.zeros(4).double()), made(torch.zeros(4).long())
    with pytest.raises(RuntimeError, match="max: out is "):
        torch.max(x, 1, out=(values, places))
    given = torch.max(x, 1, out=(made(torch.zeros(4)), places))
    assert given[1] is places and places.full().tolist() == x.full().argmax(1).tolist()


@on_ranks(2)
def test_out_of_what_requires_grad_raises_where_torch_does(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    leaf = consistent.distribute(torch.rand(4, 4), placement, S(0)).requires_grad_()
    fixed, out = leaf.detach() * 2, torch.zeros_like(leaf)
    for _ in range(2):
        torch.sin(fixed, out=out)
        with pytest.raises(RuntimeError, match="sin: x is .*requires grad.*torch.no_grad"):
            torch.sin(leaf, out=out)
        with pytest.raises(RuntimeError, match="add: x is .*requires grad.*torch.no_grad"):
            torch.add(fixed, 1, out=leaf)
        with torch.no_grad():
            torch.sin(leaf, out=out)
        assert torch.equal(out, leaf.detach().sin())
        torch.eq(leaf, leaf, out=torch.zeros_like(leaf, dtype=torch.bool))
