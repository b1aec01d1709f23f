"""A call of each op that may refuse values in backward: by the values themselves, or by a gradient,
of which those of the last row are bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

la = torch.linalg
ROWS = 6
_AXES = (1, 2)


@dataclass(frozen=True)
class Refusal:
    """``times``: of backward, of which the last one refuses; ``bad``: the matrix that it refuses,
    with a gradient of NaN if ``by_both``; else it refuses a gradient of NaN alone."""

    name: str
    run: Callable[..., Any]
    times: int = 1
    bad: torch.Tensor | None = None
    dtype: torch.dtype = torch.complex128
    by_both: bool = False

    def values(self, is_bad: bool) -> torch.Tensor:
        """The operand, of one process."""
        x = torch.arange(ROWS * 9.0, dtype=torch.float64).view(ROWS, 3, 3).sin()
        x = (x + torch.diag(torch.tensor([2.0, 4.0, 7.0]))).to(self.dtype)
        x = x + 0.2j * x.flip(2) if self.dtype.is_complex else x
        if is_bad and self.bad is not None:
            x[-1] = self.bad
        return x

    def weight(self, is_bad: bool) -> torch.Tensor:
        """What gradients are multiplied by, for each row."""
        weight = torch.arange(1.0, 1.0 + ROWS, dtype=torch.float64)
        if is_bad and (self.bad is None or self.by_both):
            weight[-1] = float("nan")
        return weight

    def gradient(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Of what ``run`` gives of ``x``, or of its gradient, times ``weight``."""
        outs = [y for y in tree_leaves(self.run(x)) if y.requires_grad]
        by_graph = self.times > 1 or self.bad is not None
        for again in reversed(range(self.times)):
            loss = sum((y.abs() * weight.view(-1, *(1,) * (y.ndim - 1))).sum() for y in outs)
            outs = torch.autograd.grad(loss, x, create_graph=by_graph or again > 0)
            weight = weight if again else torch.ones_like(weight)
        return outs[0]


def _of_low_rank(run: Callable[..., Any]) -> Callable[..., Any]:
    def seeded(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return run(x, q=1, niter=1)

    return seeded


def _phases() -> tuple[Refusal, ...]:
    real = torch.float64
    once = (
        ("linalg_eig", la.eig, torch.complex128),
        ("linalg_eig", la.eig, real),
        ("linalg_eigh", la.eigh, torch.complex128),
        ("_linalg_eigh", torch._linalg_eigh, torch.complex128),
        ("linalg_svd", la.svd, torch.complex128),
        ("_linalg_svd", torch._linalg_svd, torch.complex128),
        ("svd", torch.svd, torch.complex128),
        ("svd_lowrank", _of_low_rank(torch.svd_lowrank), torch.complex128),
        ("pca_lowrank", _of_low_rank(torch.pca_lowrank), torch.complex128),
    )
    again = (
        ("linalg_eigvals", la.eigvals, torch.complex128),
        ("linalg_eigvals", la.eigvals, real),
        ("linalg_eigvalsh", la.eigvalsh, torch.complex128),
        ("linalg_svdvals", la.svdvals, torch.complex128),
        ("linalg_cond", la.cond, torch.complex128),
        ("linalg_norm", lambda x: la.norm(x, "nuc", dim=_AXES), torch.complex128),
        ("linalg_matrix_norm", lambda x: la.matrix_norm(x, 2), torch.complex128),
        ("norm", lambda x: torch.norm(x, "nuc", dim=_AXES), torch.complex128),
    )
    return (
        *(Refusal(name, run, dtype=dtype) for name, run, dtype in once),
        *(Refusal(name, run, 2, dtype=dtype) for name, run, dtype in (*once, *again)),
    )


def _solved() -> tuple[Refusal, ...]:
    runs = {
        "logdet": torch.logdet,
        "slogdet": lambda x: torch.slogdet(x)[1],
        "linalg_slogdet": lambda x: la.slogdet(x)[1],
        "linalg_solve_ex": lambda x: la.solve_ex(x, x[..., :1] * 0 + 1)[0],
    }
    zeros = torch.zeros(3, 3)
    return tuple(Refusal(name, run, bad=zeros, dtype=torch.float64) for name, run in runs.items())


def _products() -> tuple[Refusal, ...]:
    to = torch.zeros(ROWS, 3, 3, dtype=torch.int64)
    runs = {
        "scatter_reduce": lambda x: torch.scatter_reduce(torch.ones_like(x), 1, to, x, "prod"),
        "index_reduce": lambda x: torch.index_reduce(torch.ones_like(x), 1, to[0, 0], x, "prod"),
    }
    zeros = torch.zeros(3, 3)
    return tuple(Refusal(name, run, 2, zeros, torch.float64) for name, run in runs.items())


def _determinants() -> tuple[Refusal, ...]:
    runs, unknown = {"det": torch.det, "linalg_det": la.det}, torch.zeros(3, 3)
    unknown[0, 1] = float("nan")
    return (
        *(Refusal(name, run, 2, torch.zeros(3, 3), by_both=True) for name, run in runs.items()),
        *(Refusal(name, run, bad=unknown) for name, run in runs.items()),
        *(Refusal(name, run, bad=unknown, dtype=torch.float64) for name, run in runs.items()),
    )


REFUSALS = (*_phases(), *_solved(), *_determinants(), *_products())
