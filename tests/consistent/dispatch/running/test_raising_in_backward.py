"""Which ops refuse values in backward, and what the ranks do of which one alone has met them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import consistent
from consistent import S
from mirrored.transports.default import current
from tests.consistent.dispatch.running.raising import CASES, Case
from tests.consistent.dispatch.running.test_agreed import raised
from tests.ranks import ALL, pool

# Eigenvectors and singular vectors have a phase, or a sign, of their own: torch refuses a gradient
# that depends on it, which it finds by looking at values. NaN and infinity depend on all.
OF_A_PHASE = {"linalg_eig", "linalg_eigh", "_linalg_eigh", "linalg_svd", "_linalg_svd", "svd"}
PHASE = "specified up to multiplication by"
# Torch has no derivative of these, or none for the sizes of the case.
NO_GRADIENT = ("is not implemented", "returned an invalid gradient")


def _leaves(case: Case, kind: str, to: torch.dtype) -> list[Any]:
    """The operands of ``case``, its own or others, that require grad where they are numbers."""
    given = []
    for i, x in enumerate(case.good):
        x = x.clone()
        if x.is_floating_point():
            if i == 0 and kind == "equal":
                x = torch.full_like(x, 0.5)
            if i == 0 and kind == "diagonal" and x.ndim > 2:
                x = torch.eye(*x.shape[-2:], dtype=x.dtype).expand_as(x).clone()
            x = (x.to(to) if case.name in OF_A_PHASE else x).requires_grad_()
        given.append(x)
    return given


def _tried(case: Case) -> Iterator[str | None]:
    """What backward says of each gradient of each kind of operands that the op takes."""
    dtypes = (torch.float64, torch.complex128) if case.name in OF_A_PHASE else (torch.float64,)
    for kind, dtype in ((kind, dtype) for kind in ("own", "equal", "diagonal") for dtype in dtypes):
        given = _leaves(case, kind, dtype)
        try:
            outs = [x for x in tree_leaves(case.run(*given)) if x.requires_grad]
        except (RuntimeError, IndexError):
            continue
        leaves = [x for x in given if x.requires_grad]
        for value in (1.0, 0.0, float("nan"), float("inf")) if outs else ():
            grads = [torch.full_like(x, value) for x in outs]
            said = raised(
                lambda a=(outs, leaves, grads): torch.autograd.grad(
                    *a, allow_unused=True, retain_graph=True
                )
            )
            yield said and said[1]


@pytest.mark.filterwarnings("ignore")
def test_only_what_has_a_phase_of_its_own_refuses_values_in_backward() -> None:
    refusing = set()
    for case in CASES:
        for said in _tried(case):
            if said is not None and not any(words in said for words in NO_GRADIENT):
                assert PHASE in said, (case.name, said)
                refusing.add(case.name)
    assert refusing == OF_A_PHASE


def _refused_on_one_rank(rank: int, name: str) -> list[str]:
    """What the ranks raise in backward, and by what they do next."""
    case = next(case for case in CASES if case.name == name)
    placement = consistent.placement("cpu", range(current().size))
    x = consistent.distribute(case.good[0].to(torch.complex128), placement, S(0))
    outs = [y for y in tree_leaves(case.run(x.requires_grad_())) if y.requires_grad]
    weight = torch.ones(len(x), *(1,) * (outs[0].ndim - 1), dtype=torch.float64)
    weight[-1] = float("nan")  # in the last rank's part
    loss = sum((y.abs() * weight.view(len(x), *(1,) * (y.ndim - 1))).sum() for y in outs)
    said = [raised(lambda: torch.autograd.grad(loss, x)), raised(lambda: x.abs().sum().item())]
    said.append(raised(lambda: x.abs().sum().item()))
    return ["no error" if each is None else each[1] for each in said]


@pytest.mark.filterwarnings("ignore")
def test_no_rank_goes_on_with_another_step_once_one_has_raised() -> None:
    """As docs/faults.md says of backward: it raises alone, and nothing is sent from then on."""
    for name in sorted(OF_A_PHASE) if ALL else ("linalg_eigh",):
        *others, last = pool(2).run(_refused_on_one_rank, name)
        pool(2).close()
        assert PHASE in last[0], (name, last)
        for found in (*others, last):
            assert "no error" not in found[1:], (name, found)
