"""A call of each op that may raise by value: with values that it takes, and with one that it
refuses, which lies in the shard of one rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from consistent import B, S
from tests.torch_release import IS_2_13

la = torch.linalg
_T = torch.Tensor
_NAN = float("nan")
ROWS = 6


@dataclass(frozen=True)
class Case:
    """``run`` of global tensors made of ``good``, laid out as ``sbp``; ``bad`` stands in place of
    the tensor with number ``at``, and differs from it in the last row."""

    name: str
    run: Callable[..., Any]
    good: tuple[torch.Tensor, ...]
    bad: torch.Tensor
    at: int
    sbp: tuple[Any, ...]

    def given(self, is_bad: bool) -> tuple[torch.Tensor, ...]:
        """The whole tensors."""
        return tuple(self.bad if is_bad and i == self.at else x for i, x in enumerate(self.good))


def last(x: torch.Tensor, value: Any, dim: int = 0) -> torch.Tensor:
    bad = x.clone()
    bad.select(dim, -1).copy_(torch.as_tensor(value, dtype=x.dtype).expand_as(bad.select(dim, -1)))
    return bad


def _case(
    name: str, run: Callable[..., Any], *good: torch.Tensor, bad: Any, at: int = 0, sbp: Any = None
) -> Case:
    if not isinstance(bad, torch.Tensor) or bad.shape != good[at].shape:
        bad = last(good[at], bad)
    layouts = tuple(S(0) for _ in good) if sbp is None else sbp
    return Case(name, run, good, bad, at, layouts)


def _matrices() -> torch.Tensor:
    eye = torch.eye(3, dtype=torch.float64)
    return eye * torch.arange(2.0, 2.0 + ROWS, dtype=torch.float64).view(-1, 1, 1) + 0.25


def _ldl(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factor, pivots = la.ldl_factor(x)
    return factor, pivots


_A = _matrices()
_SINGULAR, _NANS = torch.zeros(3, 3), torch.full((3, 3), _NAN)
_B = torch.ones(ROWS, 3, 2, dtype=torch.float64)
_LU, _LU_PIVOTS = la.lu_factor(_A)
_LDL, _LDL_PIVOTS = _ldl(_A)
_TALL = torch.arange(1.0, ROWS * 12 + 1, dtype=torch.float64).view(ROWS, 4, 3).cos()

# Of which this torch has no case.
LEFT_OUT = set()
if not inspect.isbuiltin(torch.cholesky):  # since 2.14 a function in Python that always raises
    LEFT_OUT.add("cholesky")
if not IS_2_13:
    LEFT_OUT.add("linalg_ldl_solve")  # before, wrong pivots make it write beside its memory

_MATRICES = (
    _case("linalg_cholesky", la.cholesky, _A, bad=-torch.eye(3)),
    _case("cholesky", torch.cholesky, _A, bad=-torch.eye(3)),
    _case("linalg_cholesky_ex", lambda x: la.cholesky_ex(x, check_errors=True), _A, bad=_SINGULAR),
    _case("cholesky_inverse", torch.cholesky_inverse, _A, bad=_SINGULAR),
    _case("linalg_inv", la.inv, _A, bad=_SINGULAR),
    _case("inverse", torch.inverse, _A, bad=_SINGULAR),
    _case("linalg_inv_ex", lambda x: la.inv_ex(x, check_errors=True), _A, bad=_SINGULAR),
    _case("linalg_matrix_power", lambda x: la.matrix_power(x, -1), _A, bad=_SINGULAR),
    _case("matrix_power", lambda x: torch.matrix_power(x, -2), _A, bad=_SINGULAR),
    _case("linalg_solve", la.solve, _A, _B, bad=_SINGULAR),
    _case(
        "linalg_solve_ex", lambda a, b: la.solve_ex(a, b, check_errors=True), _A, _B, bad=_SINGULAR
    ),
    _case("linalg_lu_factor", la.lu_factor, _A, bad=_SINGULAR),
    _case(
        "linalg_lu_factor_ex", lambda x: la.lu_factor_ex(x, check_errors=True), _A, bad=_SINGULAR
    ),
    _case("lu_solve", torch.lu_solve, _B, _LU, _LU_PIVOTS, bad=0, at=2),
    _case("linalg_lu_solve", la.lu_solve, _LU, _LU_PIVOTS, _B, bad=0, at=1),
    _case("lu_unpack", torch.lu_unpack, _LU, _LU_PIVOTS, bad=9, at=1),
    _case("linalg_ldl_factor", la.ldl_factor, _A, bad=_SINGULAR),
    _case(
        "linalg_ldl_factor_ex", lambda x: la.ldl_factor_ex(x, check_errors=True), _A, bad=_SINGULAR
    ),
    _case("linalg_ldl_solve", la.ldl_solve, _LDL, _LDL_PIVOTS, _B, bad=0, at=1),
    _case("linalg_eig", la.eig, _A, bad=_NANS),
    _case("linalg_eigh", la.eigh, _A, bad=_NANS),
    _case("linalg_eigvalsh", la.eigvalsh, _A, bad=_NANS),
    _case("_linalg_eigh", torch._linalg_eigh, _A, bad=_NANS),
    _case("linalg_svd", la.svd, _TALL, bad=_NAN),
    _case("_linalg_svd", torch._linalg_svd, _TALL, bad=_NAN),
    _case("svd", torch.svd, _TALL, bad=_NAN),
    _case("linalg_svdvals", la.svdvals, _A, bad=_NANS),
    _case("linalg_cond", la.cond, _A, bad=_NANS),
    _case("linalg_matrix_rank", la.matrix_rank, _A, bad=_NANS),
    _case("norm", lambda x: torch.norm(x, "nuc", dim=(1, 2)), _A, bad=_NANS),
    _case("pinverse", torch.pinverse, _TALL, bad=_NAN),
    _case("linalg_pinv", la.pinv, _TALL, bad=_NAN),
    _case("linalg_norm", lambda x: la.norm(x, "nuc", dim=(1, 2)), _A, bad=_NANS),
    _case("linalg_matrix_norm", lambda x: la.matrix_norm(x, 2), _A, bad=_NANS),
)
MATRICES = tuple(case for case in _MATRICES if case.name not in LEFT_OUT)

_X = torch.arange(1.0, ROWS * 4 + 1, dtype=torch.float64).view(ROWS, 4)
_I = torch.arange(ROWS) % 3
_LONG = torch.tensor([1, 2, 0, 3, 1, 2])
_TABLE = _X.clone()
_IDS = torch.arange(ROWS * 2).view(ROWS, 2) % 4
_ONE_D = torch.arange(1.0, 13.0, dtype=torch.float64)
_IN = (B, S(0))
_MANY = torch.arange(60000.0, dtype=torch.float64) % 7  # so many that they are not gathered


def _with(name: str, *rest: Any) -> Callable[..., Any]:
    return lambda x, *others: getattr(torch, name)(x, *rest, *others)


def _set(x: _T, index: _T) -> _T:
    x = x.clone()
    x[index] = 1.0
    return x


LOOK_UPS = (
    _case("embedding", lambda t, i: F.embedding(i, t), _TABLE, _I, bad=-1, at=1, sbp=_IN),
    _case("embedding", lambda t, i: F.embedding(i, t), _TABLE, _I, bad=99, at=1, sbp=(S(0), S(0))),
    _case("embedding", lambda t, i: F.embedding(i, t), _TABLE, _I, bad=99, at=1, sbp=(S(1), S(0))),
    _case("getitem", lambda t, i: t[i], _TABLE, _I, bad=99, at=1, sbp=_IN),
    _case("getitem", lambda t, i: t[i], _TABLE, _I, bad=-99, at=1, sbp=(S(0), S(0))),
    _case("index", lambda t, i: torch.ops.aten.index(t, [i]), _TABLE, _I, bad=99, at=1, sbp=_IN),
    _case("index_select", _with("index_select", 0), _TABLE, _I, bad=-1, at=1, sbp=_IN),
    _case("index_select", _with("index_select", 0), _TABLE, _I, bad=99, at=1, sbp=(S(0), S(0))),
    _case("gather", _with("gather", 1), _X, _IDS, bad=7, at=1),
    _case("gather", _with("gather", 0), _X, _IDS, bad=-7, at=1),
    _case("take", torch.take, _X, _I, bad=999, at=1, sbp=_IN),
    _case("take", torch.take, _X, _I, bad=999, at=1, sbp=(S(0), S(0))),
    _case("take_along_dim", torch.take_along_dim, _X, _I, bad=99, at=1),
    _case("put", torch.put, _X, _I, _I.double(), bad=999, at=1),
    _case("index_add", _with("index_add", 0), _X, _I, _X, bad=99, at=1, sbp=(B, S(0), S(0))),
    _case("index_add", _with("index_add", 0), _X, _I, _X, bad=-1, at=1),
    _case("index_copy", _with("index_copy", 0), _X, _LONG.argsort(), _X, bad=99, at=1),
    _case("index_fill", lambda x, i: torch.index_fill(x, 0, i, 2.0), _X, _I, bad=99, at=1),
    _case(
        "index_reduce",
        lambda x, i, s: torch.index_reduce(x, 0, i, s, "prod"),
        _X,
        _I,
        _X,
        bad=99,
        at=1,
    ),
    _case("scatter", _with("scatter", 1), _X, _IDS, _X, bad=7, at=1),
    _case("scatter_add", _with("scatter_add", 1), _X, _IDS, _X, bad=7, at=1),
    _case("scatter_add", _with("scatter_add", 0), _X, _IDS, _X, bad=17, at=1, sbp=(B, S(0), S(0))),
    _case(
        "scatter_reduce",
        lambda x, i, s: torch.scatter_reduce(x, 1, i, s, "sum"),
        _X,
        _IDS,
        _X,
        bad=7,
        at=1,
    ),
    _case("index_put", lambda x, i, v: torch.index_put(x, (i,), v, True), _X, _I, _X, bad=99, at=1),
    _case("setitem", _set, _X, _I, bad=99, at=1),
    _case(
        "masked_scatter",
        torch.masked_scatter,
        _X,
        _X > 22,
        _ONE_D[:2],
        bad=True,
        at=1,
        sbp=(S(0), S(0), B),
    ),
    _case(
        "masked_scatter",
        torch.masked_scatter,
        _X,
        _X > 22,
        _ONE_D[:2],
        bad=True,
        at=1,
        sbp=(S(0), B, B),
    ),
    _case("one_hot", lambda i: F.one_hot(i, 5), _I, bad=5),
    _case("bincount", torch.bincount, _MANY.long(), bad=-1),
    _case("repeat_interleave", lambda x, n: torch.repeat_interleave(x, n, 0), _X, _I, bad=-1, at=1),
    _case(
        "searchsorted",
        lambda x, v, s: torch.searchsorted(x, v, sorter=s),
        _X,
        _X,
        _X.argsort(1),
        bad=99,
        at=2,
    ),
    _case(
        "embedding_bag",
        lambda t, i, o: F.embedding_bag(i, t, o),
        _TABLE,
        _I,
        torch.tensor([0, 2, 4]),
        bad=99,
        at=1,
        sbp=(B, S(0), B),
    ),
    _case("embedding_bag", lambda t, i: F.embedding_bag(i, t), _TABLE, _IDS, bad=99, at=1, sbp=_IN),
    _case(
        "embedding_bag",
        lambda t, i: F.embedding_bag(i, t),
        _TABLE,
        _IDS,
        bad=99,
        at=1,
        sbp=(S(0), S(0)),
    ),
)

_P = torch.linspace(0.1, 0.9, ROWS * 2, dtype=torch.float64).view(ROWS, 2)
_WHOLE = torch.arange(1, ROWS * 2 + 1).view(ROWS, 2)
_ZERO = last(_WHOLE, 0)
_POOLED = torch.arange(ROWS * 4.0, dtype=torch.float64).view(ROWS, 1, 2, 2)
_PLACES = torch.tensor([[0, 3], [8, 11]]).expand(ROWS, 1, 2, 2).contiguous()
_TARGETS = torch.tensor([[1, 0, -1, 0]] * ROWS)
_LOG = torch.log_softmax(
    torch.arange(8.0 * ROWS * 5, dtype=torch.float64).view(8, ROWS, 5).cos(), 2
)

LOSSES = (
    _case("cross_entropy_loss", F.cross_entropy, _X, _I, bad=4, at=1),
    _case("cross_entropy_loss", F.cross_entropy, _X, _I, bad=4, at=1, sbp=(S(1), S(0))),
    _case("cross_entropy_loss", torch._C._nn.cross_entropy_loss, _X, _I, bad=-1, at=1),
    _case("nll_loss", torch._C._nn.nll_loss, _X, _I, bad=4, at=1),
    _case("nll_loss_nd", F.nll_loss, _X, _I, bad=4, at=1),
    _case("nll_loss_nd", F.nll_loss, _X, _I, bad=4, at=1, sbp=(S(1), S(0))),
    _case(
        "nll_loss2d",
        torch._C._nn.nll_loss2d,
        _X.view(ROWS, 4, 1, 1),
        _I.view(-1, 1, 1),
        bad=4,
        at=1,
    ),
    _case("multi_margin_loss", F.multi_margin_loss, _X, _I, bad=4, at=1),
    _case("multilabel_margin_loss", F.multilabel_margin_loss, _X, _TARGETS, bad=4, at=1),
    _case("binary_cross_entropy", F.binary_cross_entropy, _P, _P, bad=1.5),
    _case("binary_cross_entropy", F.binary_cross_entropy, _P, _P, bad=-0.5, at=1),
    _case(
        "ctc_loss",
        F.ctc_loss,
        _LOG,
        torch.ones(ROWS, 2, dtype=torch.int64),
        torch.full((ROWS,), 8),
        torch.full((ROWS,), 2),
        bad=9,
        at=2,
        sbp=(S(1), S(0), S(0), S(0)),
    ),
    _case("max_unpool2d", lambda x, i: F.max_unpool2d(x, i, 2), _POOLED, _PLACES, bad=77, at=1),
    _case(
        "max_unpool3d",
        lambda x, i: F.max_unpool3d(x, i, 2),
        _POOLED.view(ROWS, 1, 1, 2, 2),
        _PLACES.view(ROWS, 1, 1, 2, 2),
        bad=77,
        at=1,
    ),
)

NUMBERS = (
    _case("floor_divide", torch.floor_divide, _WHOLE, _WHOLE, bad=0, at=1),
    _case("floor_divide", lambda i: 7 // i, _WHOLE, bad=0),
    _case("remainder", torch.remainder, _WHOLE, _WHOLE, bad=0, at=1),
    _case("remainder", lambda i: 7 % i, _WHOLE, bad=0),
    _case("fmod", torch.fmod, _WHOLE, _WHOLE, bad=0, at=1),
    _case("div", lambda a, b: torch.div(a, b, rounding_mode="floor"), _WHOLE, _WHOLE, bad=0, at=1),
    _case(
        "divide",
        lambda a, b: torch.divide(a, b, rounding_mode="trunc"),
        _WHOLE,
        _WHOLE,
        bad=0,
        at=1,
    ),
    _case("bernoulli", torch.bernoulli, _P, bad=1.5),
    _case("bernoulli", lambda p: p.clone().bernoulli_(p), _P, bad=-0.5),
    _case("multinomial", lambda p: torch.multinomial(p, 1), _P, bad=-1.0),
    _case("poisson", torch.poisson, _P, bad=-1.0),
    _case("normal", torch.normal, _P, _P, bad=-1.0, at=1),
    _case("quantile", torch.quantile, _X, _ONE_D[:ROWS] / 20, bad=2.0, at=1),
    _case("nanquantile", torch.nanquantile, _X, _ONE_D[:ROWS] / 20, bad=2.0, at=1),
    _case("histc", lambda x: torch.histc(x, 3), _MANY, bad=_NAN),
    _case("histogram", lambda x: torch.histogram(x, 3)[0], _MANY, bad=_NAN),
)

CASES = MATRICES + LOOK_UPS + LOSSES + NUMBERS
