"""Calls that prove the rows of consistent/rules/matrices.py."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.brute_force import example, fixed
from tests.consistent.rules.examples.numbers import complex_, real
from tests.torch_release import IS_2_13

la = torch.linalg


def _regular(*shape: int) -> torch.Tensor:
    """Matrices far from singular, with eigenvalues apart."""
    n = shape[-1]
    return real(*shape) / 4 + torch.diag(torch.arange(1.0, n + 1, dtype=torch.float64))


def _symmetric(*shape: int) -> torch.Tensor:
    x = _regular(*shape)
    return x + x.mT


def _lower(*shape: int) -> torch.Tensor:
    return _regular(*shape).tril().contiguous()


def _lu(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return la.lu_factor(_regular(*shape))


def _ldl(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    factor, pivots = la.ldl_factor(_symmetric(*shape))
    return fixed(factor), pivots


# Builtins that torch 2.14 has replaced by functions that raise.
GONE = {name for name in ("cholesky", "qr") if not inspect.isbuiltin(getattr(torch, name))}


def _of_old(name: str, *args: Any) -> tuple[Any, ...]:
    return () if name in GONE else (example(getattr(torch, name), *args),)


_LU, _PIVOTS = _lu(5, 3, 3)

_FACTORS = (
    example(la.cholesky, _symmetric(5, 3, 3)),
    *_of_old("cholesky", _symmetric(2, 4, 3, 3), True),
    example(la.cholesky_ex, _symmetric(5, 3, 3)),
    example(torch.cholesky_inverse, _lower(5, 3, 3)),
    example(la.eig, fixed(_regular(5, 3, 3))),
    example(la.eigh, fixed(_symmetric(5, 3, 3))),
    example(la.eigvals, _regular(5, 3, 3)),
    example(la.eigvalsh, _symmetric(4, 3, 3)),
    example(la.householder_product, real(5, 4, 3), real(5, 3)),
    example(torch.orgqr, real(4, 3), real(3)),
    example(torch._linalg_eigh, fixed(_symmetric(5, 3, 3))),
    example(torch._linalg_svd, fixed(real(5, 4, 3))),
    example(torch._linalg_svd, fixed(real(5, 4, 3)), compute_uv=False),
    example(la.ldl_factor, fixed(_symmetric(5, 3, 3))),
    example(la.ldl_factor_ex, fixed(_symmetric(5, 3, 3))),
    example(la.lu, real(5, 4, 3)),
    example(la.lu_factor, real(5, 3, 4)),
    example(la.lu_factor_ex, real(2, 2, 3, 3)),
    example(torch._lu_with_info, real(5, 3, 3)),
    example(torch.lu_unpack, _LU, _PIVOTS),
    example(torch.lu_unpack, fixed(real(5, 3, 3)), _PIVOTS, unpack_data=False),
    example(la.qr, real(5, 4, 3)),
    example(la.qr, fixed(real(5, 4, 3)), "r"),
    *_of_old("qr", real(4, 3)),
    example(la.svd, real(5, 4, 3), False),
    example(la.svdvals, real(2, 4, 3)),
    example(torch.svd, real(4, 4, 3)),
)

_FUNCTIONS = (
    example(torch.det, _regular(5, 3, 3)),
    example(la.det, complex_(2, 4, 3, 3)),
    example(torch.logdet, _symmetric(5, 3, 3)),
    example(la.slogdet, _regular(5, 3, 3)),
    example(torch.slogdet, _regular(3, 3)),
    example(la.cond, _regular(5, 3, 3)),
    example(la.inv, _regular(5, 3, 3)),
    example(torch.inverse, _regular(2, 3, 3)),
    example(la.inv_ex, _regular(5, 3, 3)),
    example(torch.matrix_exp, real(5, 3, 3)),
    example(torch.ops.aten.linalg_matrix_exp.default, real(5, 3, 3)),
    example(la.matrix_power, _regular(5, 3, 3), 3),
    example(torch.matrix_power, _regular(4, 3, 3), -2),
    example(la.matrix_rank, real(5, 4, 3)),
    example(la.matrix_rank, real(4, 4, 3), atol=real(4).abs()),
    example(la.pinv, real(5, 4, 3)),
    example(torch.pinverse, real(4, 3)),
    example(torch.trace, real(5, 7)),
    *([example(torch.trace, real(4, 2))] if IS_2_13 else []),
)

_SYSTEMS = (
    example(la.solve, _regular(5, 3, 3), real(5, 3, 4)),
    example(la.solve, _regular(5, 3, 3), real(5, 3)),
    example(la.solve, _regular(3, 3), real(3)),
    example(la.solve, _regular(2, 1, 3, 3), real(4, 3, 2)),
    example(la.solve, _regular(5, 3, 3), real(5, 4, 3), left=False),
    example(la.solve_ex, _regular(5, 3, 3), real(5, 3, 4)),
    example(la.solve_triangular, _regular(5, 3, 3), real(5, 3, 4), upper=True),
    example(la.solve_triangular, _regular(3, 3), real(4, 3), upper=False, left=False),
    example(torch.triangular_solve, real(5, 3, 4), _regular(5, 3, 3)),
    example(torch.cholesky_solve, real(5, 3, 4), _lower(5, 3, 3)),
    example(torch.lu_solve, real(5, 3, 4), _LU, _PIVOTS),
    example(la.lu_solve, _LU, _PIVOTS, real(5, 3, 4)),
    example(la.lu_solve, _LU, _PIVOTS, real(5, 4, 3), left=False),
    example(la.lu_solve, _LU, _PIVOTS, real(5, 3, 4), adjoint=True),
    example(la.lu_solve, _LU, _PIVOTS, real(5, 4, 3), left=False, adjoint=True),
    example(la.ldl_solve, *_ldl(5, 3, 3), fixed(real(5, 3, 4))),
)

_PRODUCTS = (
    example(torch._VF.cdist, real(2, 5, 3), real(2, 4, 3), 2.0, None),
    example(torch.ops.aten.chain_matmul.default, [real(5, 4), real(4, 3), real(3, 7)]),
    example(torch._VF.cdist, real(5, 3), real(4, 3), 1.0, None),
    example(la.multi_dot, [real(5, 4), real(4, 3), real(3, 7)]),
    example(la.multi_dot, [real(4), real(4, 3), real(3)]),
    example(torch.cross, real(5, 3), real(5, 3)),
    example(torch.cross, real(4, 3, 3), real(4, 3, 3), dim=1),
    example(la.cross, real(5, 3, 4), real(1, 3, 1), dim=-2),
    example(torch.kron, real(3, 4), real(2, 5)),
    example(torch.kron, real(6), real(4, 1)),
    example(torch.kron, real(4), real(4, 1, 2)),
    example(la.vander, real(5, 4)),
    example(la.vander, real(2, 4), N=3),
    example(la.vecdot, real(5, 4), real(5, 4)),
    example(la.vecdot, complex_(5, 4, 3), complex_(4, 3), dim=-2),
)

EXAMPLES = (*_FACTORS, *_FUNCTIONS, *_SYSTEMS, *_PRODUCTS)
