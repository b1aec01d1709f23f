"""Every flag of the ops on matrices, with operands split, broadcast and partial in every way: as
plain torch, values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent import B, P, Placement, S
from consistent.spec import Sbp
from tests.ranks import ON_ONE_AXIS, pool
from tests.twins import GRIDS, Laid, assert_same, randn

la = torch.linalg
Op = Callable[..., Any]
BATCHES = ((), (5,))
FLAGS = (False, True)


def _regular(batch: tuple[int, ...]) -> torch.Tensor:
    return randn(*batch, 3, 3) / 4 + torch.diag(torch.arange(1.0, 4, dtype=torch.float64))


def _symmetric(batch: tuple[int, ...]) -> torch.Tensor:
    x = _regular(batch)
    return x + x.mT


def _lower(batch: tuple[int, ...]) -> torch.Tensor:
    return _regular(batch).tril()


def _tall(batch: tuple[int, ...]) -> torch.Tensor:
    return randn(*batch, 4, 3)


def _side(left: bool, batch: tuple[int, ...]) -> torch.Tensor:
    shape = (3, 4) if left else (4, 3)
    return randn(*batch, *shape, seed=1)


def _flagged(op: Op, *names: str) -> list[Op]:
    """``op`` under every choice of the flags ``names``."""

    def make(chosen: dict[str, bool]) -> Op:
        return lambda *tensors: op(*tensors, **chosen)

    return [
        make(dict(zip(names, flags, strict=True)))
        for flags in itertools.product(FLAGS, repeat=len(names))
    ]


def _unique(result: Any) -> Any:
    """What does not depend on the signs of eigenvectors."""
    values, vectors = result
    return values, vectors.abs()


def _factor(batch: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return la.lu_factor(_regular(batch))


def _ldl(batch: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return la.ldl_factor(_symmetric(batch))


# name -> (the op under each choice of flags, its tensors for a batch)
CASES: dict[str, tuple[list[Op], Callable[[tuple[int, ...]], tuple]]] = {
    "solve": (_flagged(la.solve), lambda b: (_regular(b), _side(True, b))),
    "solve from the right": (
        [lambda a, b: la.solve(a, b, left=False)], lambda b: (_regular(b), _side(False, b)),
    ),
    "solve_ex": (_flagged(la.solve_ex, "check_errors"), lambda b: (_regular(b), _side(True, b))),
    "solve_ex from the right": (
        [lambda a, b: la.solve_ex(a, b, left=False)], lambda b: (_regular(b), _side(False, b)),
    ),
    "solve of vectors": ([la.solve], lambda b: (_regular(b), randn(*b, 3, seed=1))),
    "solve_triangular": (
        _flagged(lambda a, b, **k: la.solve_triangular(a, b, **k), "upper", "unitriangular"),
        lambda b: (_regular(b), _side(True, b)),
    ),
    "solve_triangular from the right": (
        _flagged(
            lambda a, b, **k: la.solve_triangular(a, b, left=False, **k), "upper", "unitriangular"
        ),
        lambda b: (_regular(b), _side(False, b)),
    ),
    "lu_solve": (_flagged(la.lu_solve, "adjoint"), lambda b: (*_factor(b), _side(True, b))),
    "lu_solve from the right": (
        _flagged(lambda x, p, b, **k: la.lu_solve(x, p, b, left=False, **k), "adjoint"),
        lambda b: (*_factor(b), _side(False, b)),
    ),
    "torch.lu_solve": ([torch.lu_solve], lambda b: (_side(True, b), *_factor(b))),
    "cholesky_solve": (
        _flagged(torch.cholesky_solve, "upper"), lambda b: (_side(True, b), _lower(b)),
    ),
    "triangular_solve": (
        _flagged(torch.triangular_solve, "upper", "transpose", "unitriangular"),
        lambda b: (_side(True, b), _regular(b)),
    ),
    "cholesky": (_flagged(la.cholesky, "upper"), lambda b: (_symmetric(b),)),
    "cholesky_inverse": (_flagged(torch.cholesky_inverse, "upper"), lambda b: (_lower(b),)),
    "ldl_solve": (
        [lambda x, p, b: la.ldl_solve(x.detach(), p, b.detach())],
        lambda b: (*_ldl(b), _side(True, b)),
    ),
    "lstsq": ([lambda a, b: la.lstsq(a, b)[0]], lambda b: (_tall(b), randn(*b, 4, 2, seed=1))),
    "ormqr": (
        _flagged(lambda a, t, c, **k: torch.ormqr(a.detach(), t.detach(), c.detach(), **k),
                 "transpose"),
        lambda b: (*torch.geqrf(_tall(b)), randn(*b, 4, 5, seed=1)),
    ),
    "ormqr from the right": (
        _flagged(lambda a, t, c, **k: torch.ormqr(
            a.detach(), t.detach(), c.detach(), left=False, **k), "transpose"),
        lambda b: (*torch.geqrf(_tall(b)), randn(*b, 5, 4, seed=1)),
    ),
    "tensorsolve": (
        [la.tensorsolve], lambda b: (_regular(()).view(3, 1, 3), randn(3, 1, seed=1)),
    ),
    "tensorinv": ([lambda a: la.tensorinv(a, ind=1)], lambda b: (_regular(()).view(3, 1, 3),)),
    "eigh": (
        [lambda a, uplo=uplo: _unique(la.eigh(a.detach(), uplo)) for uplo in "LU"],
        lambda b: (_symmetric(b),),
    ),
    "eigvalsh": (
        [lambda a, uplo=uplo: la.eigvalsh(a, uplo) for uplo in "LU"], lambda b: (_symmetric(b),),
    ),
    "qr": (
        [lambda a, mode=mode: la.qr(a.detach(), mode) for mode in ("reduced", "complete", "r")],
        lambda b: (_tall(b),),
    ),
    "svd": (
        [lambda a, full=full: la.svd(a.detach(), full)[1] for full in FLAGS],
        lambda b: (_tall(b),),
    ),
    "lu": ([la.lu], lambda b: (_tall(b),)),
    "lu_factor": ([la.lu_factor], lambda b: (_tall(b),)),
    "pinv": (_flagged(la.pinv, "hermitian"), lambda b: (_symmetric(b),)),
    "matrix_rank": (_flagged(la.matrix_rank, "hermitian"), lambda b: (_symmetric(b),)),
    "cond": (
        # Torch cannot differentiate the others.
        [la.cond, *(lambda a, p=p: la.cond(a.detach(), p) for p in (2, -2, "fro", "nuc", 1, -1))],
        lambda b: (_regular(b),),
    ),
    "matrix_norm": (
        [lambda a, p=p, k=k: la.matrix_norm(a, p, keepdim=k)
         for p in ("fro", "nuc", 1, -1, 2, -2, float("inf")) for k in FLAGS],
        lambda b: (_tall(b),),
    ),
}  # fmt: skip


def _layouts(tensors: tuple) -> list[tuple[Sbp, ...]]:
    """Each tensor in each layout with the others whole, and all split by their first dim."""
    each = []
    for i, x in enumerate(tensors):
        entries = [S(d) for d in range(x.ndim)] + [P] * x.is_floating_point()
        for entry in entries:
            each.append(tuple(entry if j == i else B for j in range(len(tensors))))
    return [
        (B,) * len(tensors),
        *each,
        (S(0),) * len(tensors),
        tuple(S(x.ndim - 1) for x in tensors),
    ]


def _results(op: Op, at: Laid, tensors: tuple, layout: tuple[Sbp, ...]) -> Any:
    pairs = zip(tensors, layout, strict=True)
    laid = [at.leaf(x, e) if x.is_floating_point() else at(x, e) for x, e in pairs]
    found = op(*laid)
    outs = [x for x in (found if isinstance(found, tuple | list) else [found])]
    graded = [x for x in outs if x.requires_grad]
    if graded:
        sum((x * randn(*x.shape, seed=7)).sum() for x in graded).backward()
    return outs, [x.grad for x in laid if x.is_floating_point()]


def _check(rank: int, ranks: Any, name: str) -> list[str]:
    ops, make = CASES[name]
    wrong = []
    for batch, (k, op) in itertools.product(BATCHES, enumerate(ops)):
        tensors = make(batch)
        wanted = _results(op, Laid(None), tensors, (B,) * len(tensors))
        for layout in _layouts(tensors):
            try:
                given = _results(op, Laid(Placement("cpu", ranks)), tensors, layout)
                assert_same(given, wanted)
            except Exception as error:  # noqa: BLE001  (all of them are listed together)
                wrong.append(f"{batch} choice {k} {layout}: {str(error)[:200]}")
    return wrong


@pytest.mark.parametrize("n", ON_ONE_AXIS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_every_flag_with_every_layout(name: str, n: int) -> None:
    for wrong in pool(n).run(_check, GRIDS[n], name):
        assert not wrong, "\n".join(wrong)
