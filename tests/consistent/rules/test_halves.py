"""Reductions, norms and losses of float16 and bfloat16: torch adds up in float32 and rounds once,
and so does every signature: nothing overflows or is rounded where shards meet.

Measured against float64: a signature may be off by no more than torch's own result is, and a few
roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from consistent.spec import P
from tests.brute_force import Example, Expected
from tests.brute_force.proof import Proof
from tests.consistent.rules.examples import losses, normalization, ordering, reduce
from tests.each_of import each
from tests.reference import join

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SORTED = ("sort", "argsort", "msort", "topk")  # which of equal numbers comes first is open


def large(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose sums are beyond float16, and whose means are not."""
    return x.abs() * 2e4


def middling(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose squares are beyond float16."""
    return x * 300


def cancelling(d: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Large numbers in the first half of dim ``d``, which those in the second cancel, so that what
    is left is less than a rounding of them."""

    def make(x: torch.Tensor) -> torch.Tensor:
        if d >= x.ndim:
            return x
        place, n = torch.arange(x.shape[d]), x.shape[d]
        sign = (place < n // 2).double() - (place >= n - n // 2).double()
        return 1000 * sign.view(-1, *[1] * (x.ndim - 1 - d)) + 0.1 * x

    make.__name__ = f"cancelling_{d}"
    return make


MAKERS = [large, middling, cancelling(0), cancelling(1), cancelling(2)]


def _cast(case: Example, make: Callable, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return make(x.double()).half().to(dtype)

    kwargs = {k: v for k, v in case.kwargs.items() if k != "dtype"}
    return tree_map(one, case.args), tree_map(one, kwargs)


def _exact(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
        (args, kwargs),
    )


def _cases() -> list[Example]:
    families = (reduce, normalization, ordering, losses)
    found = [case for family in families for case in family.EXAMPLES if case.reference is None]
    # Two of each name are enough, and of losses two of each reduction.
    names = [(repr(case).partition("(")[0], case.args[2:4][-1:]) for case in found]
    names = [name if "loss" in name[0] else name[0] for name in names]
    kept = [case for i, case in enumerate(found) if names[:i].count(names[i]) < 2]
    return [case for case in kept if not repr(case).startswith(SORTED)]


CASES = _cases()


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_halves_are_rounded_once(make: Callable) -> None:
    each(CASES, lambda case: _check_rounding(case, make))


def _check_rounding(case: Example, make: Callable) -> None:
    # Of bfloat16 no sum of ours is too large.
    dtype = torch.float16 if make in (large, middling) else torch.bfloat16
    args, kwargs = _cast(case, make, dtype)
    try:
        op = Expected(case.func, args, kwargs, 2, gradients=False)
        exact = Expected(case.func, *_exact(args, kwargs), 2, gradients=False).expected
    except (RuntimeError, NotImplementedError, TypeError):
        return  # torch has none of this dtype
    _check(op, exact, ROUNDING[dtype])


def _check(op: Expected, exact: list[torch.Tensor], rounding: float) -> None:
    inputs = [x.abs().max().item() for x in op.tensors if x.is_floating_point() and x.numel()]
    float32 = 2.0**-20 * max(inputs, default=0)
    for signature in op.signatures(0):
        if any(e.is_extreme for e in (*signature.ins, *signature.outs)):
            continue
        proof = Proof(op, (signature,))
        for i, (x, sbp) in enumerate(zip(op.tensors, proof.ins, strict=True)):
            if sbp == (P,):  # without a rounding of its own
                proof.shards[i] = [x / 2, x / 2]
        found = proof.made()
        for i, (want, torchs) in enumerate(zip(exact, op.expected, strict=True)):
            if not torchs.is_floating_point() or not torchs.isfinite().all():
                continue
            got = join([tensors[i] for tensors, _, _ in found], proof.outs[i], op.shape).double()
            allowed = (torchs.double() - want).abs() + 6 * rounding * want.abs().max() + float32
            worst = ((got - want).abs() - allowed).max() if want.numel() else torch.zeros(())
            assert worst <= 0, f"{op}\n  {signature}, output {i}: {got}\n  torch {torchs}\n  {want}"
