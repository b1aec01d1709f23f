"""What passes P keeps its values whatever stands beside the addends: infinities, NaN, 0 and huge
numbers in other operands and among numbers. A rank whose addend is 0 would make NaN of 0 * inf.

Where a dim is summed (``mk, kn -> mn``) one infinity spoils the whole sum, and addends pass: there
the result is not finite where torch's is not, but NaN may stand for an infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from consistent.rules import DoesNotFit, Signature
from consistent.spec import B, P
from tests.brute_force import Example, Expected, fixed
from tests.brute_force.proof import Proof
from tests.consistent.rules.layouts import FAMILIES, changed, examples
from tests.reference import assert_close, join

SPECIAL = [math.inf, -math.inf, math.nan, 0.0, 1e300]


def _number(value: float) -> Callable[[Any], Any]:
    return lambda x: value if type(x) is float else x


def _expected(case: Example) -> Expected | None:
    """The call, if torch takes it."""
    try:
        return Expected(case.func, case.args, case.kwargs, 2).forward_only()
    except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None


def _passing(op: Expected) -> list[Signature]:
    try:
        return [s for s in op.signatures(0) if P in s.ins and not any(e.is_split for e in s.ins)]
    except DoesNotFit:
        return []


def _beside(op: Expected) -> Iterator[int]:
    """Floating operands that a signature takes whole beside a P."""
    for i, x in enumerate(op.tensors):
        if x.is_floating_point() and any(s.ins[i] is B for s in _passing(op)):
            yield i


def _with_special(case: Example, op: Expected, i: int, value: float) -> Example:
    """``case`` with ``value`` in some elements of operand ``i``."""
    source = iter(range(len(op.tensors)))

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or next(source) != i:
            return x
        flat = x.detach().clone().flatten()
        flat[::3] = min(value, 1e30) if math.isfinite(value) and x.dtype == torch.float32 else value
        made = flat.view(x.shape)
        return fixed(made) if hasattr(x, "takes_no_gradient") else made

    return Example(case.func, *tree_map(one, (case.args, case.kwargs)))


def _check(op: Expected, sums: bool) -> None:
    for signature in _passing(op):
        if any(e.is_extreme for e in (*signature.ins, *signature.outs)):
            continue
        proof = Proof(op, (signature,))
        for i, (x, sbp) in enumerate(zip(op.tensors, proof.ins, strict=True)):
            if sbp == (P,):
                proof.shards[i] = [torch.zeros_like(x), x.detach()]
        found = proof.made()
        for i, want in enumerate(op.expected):
            got = join([tensors[i] for tensors, _, _ in found], proof.outs[i], op.shape)
            if sums and (want.is_floating_point() or want.is_complex()):
                assert torch.equal(got.isfinite(), want.isfinite()), f"{op} {signature}"
                got, want = got[want.isfinite()], want[want.isfinite()]
            assert_close(got, want, msg=lambda text, s=signature: f"{op} {s}: {text}")


# The ops whose rule sums a dim of a product, or solves a system.
SUMMING = frozenset(
    """_convolution _grouped_mm addbmm addmm addmv baddbmm bilinear bmm chain_matmul
    cholesky_solve conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution dot einsum embedding_bag linalg_ldl_solve linalg_lu_solve linalg_multi_dot
    linalg_solve linalg_solve_ex linalg_solve_triangular linalg_vecdot linear lu_solve matmul mm mv
    ormqr scaled_dot_product_attention stft tensordot trapezoid trapz triangular_solve
    vdot""".split()
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_addends_beside_infinities_nans_zeros_and_huge_numbers(family: str) -> None:
    for case in examples(family):
        op = _expected(case)
        if op is None:
            continue
        _check(op, False)
        beside = list(_beside(op))
        numbers = any(type(x) is float for x in tree_leaves((case.args, case.kwargs)))
        for value in SPECIAL:
            for i in beside:
                made = _expected(_with_special(case, op, i, value))
                if made is not None:
                    _check(made, made.known.name in SUMMING)
            made = _expected(changed(case, _number(value))) if numbers else None
            if made is not None:
                _check(made, False)
