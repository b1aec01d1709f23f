"""Operators of torch.ops.aten, as packets and with arguments by keyword."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import consistent as cs
from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.dispatch.plans.shards import is_global
from consistent.spec import B, S
from tests.brute_force import Example
from tests.consistent.rules.corpus import FAMILIES
from tests.ranks import ALL, on_ranks

aten = torch.ops.aten


class Operator(NamedTuple):
    """The operator of an example: the packet, the overload that torch takes, and the arguments."""

    packet: Any
    overload: Any
    args: tuple
    kwargs: dict[str, Any]
    draws: bool


def _operator(case: Example) -> Operator | None:
    function = resolve(case.func)
    name = function.name + "_" * function.inplace
    packet = getattr(aten, name, None)
    if packet is None:
        return None
    try:
        chosen = torch._C._jit_resolve_packet(f"aten::{name}", *case.args, **case.kwargs)
    except RuntimeError:
        return None  # sizes one by one, and what else only torch's Python functions take
    draws = case.reference is not None
    return Operator(packet, getattr(packet, chosen), case.args, case.kwargs, draws)


@functools.cache
def _operators() -> list[Operator]:
    """An example of each overload that the examples of the table reach."""
    found: dict[Any, Operator] = {}
    for case in (case for examples in FAMILIES.values() for case in examples):
        operator = _operator(case)
        if operator is not None:
            found.setdefault(operator.overload, operator)
    return list(found.values())


def _by_name(overload: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    return dict(zip(names, args, strict=False)) | kwargs


def _laid(value: Any) -> Any:
    """Copies of the tensors in ``value``: the first along its first dim, others whole."""
    p, first = cs.placement("cpu", [0, 1]), [True]

    def lay(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        entry = S(0) if first.pop() and x.ndim and len(x) > 1 else B
        first.append(False)
        return cs.distribute(x.clone(), p, entry)

    return tree_map(lay, value)


def _run(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """(whole results, layouts) of a call."""
    torch.manual_seed(0)
    made = call(*args, **kwargs)
    whole = tree_map(lambda x: x.full() if is_global(x) else x, made)
    return whole, [x.sbp for x in tree_leaves(made) if is_global(x)]


@on_ranks(2)
def test_arguments_by_keyword_are_as_by_position(rank: int) -> None:
    operators = _operators()
    assert len({each.packet for each in operators}) > 500
    for packet, overload, args, kwargs, draws in operators[:: 1 if ALL else 2]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated ops
            want, placed = _run(overload, *_laid((args, kwargs)))
            given = _by_name(overload, *_laid((args, kwargs)))
            got, named = _run(packet, (), given)
            if not draws:
                want = overload(*tree_map(_copied, args), **kwargs)
        torch.testing.assert_close(got, want, equal_nan=True, msg=str(overload))
        assert named == placed, overload


def _named_functions() -> Iterator[tuple[Callable[..., Any], dict[str, Any], bool]]:
    """The functions in torch's namespaces, with all their arguments by keyword."""
    nn: Any = torch._C._nn  # type: ignore[attr-defined]
    places = (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, nn)
    for operator in _operators():
        full = operator.packet.__name__
        for place, name in itertools.product(places, {full, full.partition("_")[2]}):
            if callable(getattr(place, name, None)):
                named = _by_name(operator.overload, operator.args, operator.kwargs)
                named = {"input" if key == "self" else key: x for key, x in named.items()}
                yield getattr(place, name), named, operator.draws


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_functions_take_all_by_keyword_in_any_order(rank: int) -> None:
    checked = 0
    for function, named, draws in itertools.islice(_named_functions(), 0, None, 1 if ALL else 2):
        try:
            torch.manual_seed(0)
            want = function(**tree_map(_copied, named))
        except (RuntimeError, TypeError, ValueError):
            continue  # it has other names
        turned = dict(reversed(_laid(named).items()))
        got, _ = _run(function, (), turned)
        if not draws:
            torch.testing.assert_close(got, want, equal_nan=True, msg=f"{function.__name__}")
        checked += 1
    assert checked > (700 if ALL else 350), checked
    x = cs.ones(3, 2, placement=cs.placement("cpu", [0, 1]), sbp=S(0))
    torch.clamp_min_(min=x * 3, input=x)
    torch._foreach_add_(other=[x], self=[x])  # type: ignore[attr-defined]
    assert torch.equal(x.full(), torch.full((3, 2), 6.0))


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


_IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.float64).view(2, 3, 8, 8).sin()
# Overloads that differ in what they take at one place, or in what it means.
SPELT = {
    "scales": lambda x: aten._upsample_bilinear2d_aa(
        x, None, align_corners=False, scale_factors=[2.0, 2.0]
    ),
    "scales of another size": lambda x: aten.upsample_bilinear2d(x, None, False, [1.6, 2.2]),
    "sizes and one scale": lambda x: aten.upsample_nearest2d(x, output_size=[4, 16], scales_w=2.0),
    "sizes and scales by place": lambda x: aten.upsample_bicubic2d(x, [16, 4], False, 2.0, 0.5),
    "sizes and other scales": lambda x: aten.upsample_bilinear2d(x, [16, 16], False, 2.5, 2.2),
    "sizes and other scales, nearest": lambda x: aten.upsample_nearest2d(x, [16, 16], 2.5, 2.2),
    "unbiased": lambda x: aten.std(x, unbiased=False),
    "unbiased as a number": lambda x: aten.std(x, 0),
    "unbiased, not dim 1": lambda x: aten.var_mean.default(x, 1),
    "correction": lambda x: aten.var(x, dim=[2], correction=0, keepdim=True),
    "left out in between": lambda x: aten.std(x, [3], keepdim=True),
    "two tensors": lambda x: aten.maximum(self=x, other=x.flip(0)),
    "max of two": lambda x: aten.max(self=x, other=x * 2),
    "max along": lambda x: aten.max(x, keepdim=True, dim=2),
    "stable": lambda x: aten.sort(x, stable=True, descending=True, dim=3),
    "order": lambda x: aten.norm(x, p=1, dim=[2]),
}


def _squares(results: list[Any]) -> torch.Tensor:
    return torch.stack([(y * y).sum() for y in results if y.is_floating_point()]).sum()


@pytest.mark.parametrize("name", SPELT)
@on_ranks(2, 3)
def test_overloads_forward_and_backward(rank: int, name: str) -> None:
    leaf = _IMAGES.clone().requires_grad_()
    want = tree_leaves(SPELT[name](leaf))
    _squares(want).backward()
    p = cs.placement("cpu", list(range(torch.distributed.get_world_size())))
    for entry in (B, S(0), S(1), S(2), S(3)):
        x = cs.distribute(_IMAGES, p, entry).requires_grad_()
        got = tree_leaves(SPELT[name](x))
        _squares(got).backward()
        torch.testing.assert_close([y.full() for y in got], want, msg=str(entry))
        torch.testing.assert_close(x.grad.full(), leaf.grad, msg=str(entry))
