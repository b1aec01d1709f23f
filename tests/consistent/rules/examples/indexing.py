"""Calls that prove the rows of consistent/rules/{index,lookup}.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.numbers import real, whole

_T = torch.Tensor
_get = _T.__getitem__
_set = _T.__setitem__
_aten = torch.ops.aten
_ALL = slice(None)


def places(n: int, *shape: int, negative: bool = False) -> torch.Tensor:
    """Indices into a dim of `n`."""
    return whole(*shape, low=-n if negative else 0, high=n)


def distinct(n: int, count: int) -> torch.Tensor:
    """Indices into a dim of `n`, each once: torch does not say who wins where two are alike."""
    return torch.arange(n).flip(0)[:count].contiguous()


_BASIC = (
    example(_get, real(5, 4), 2),
    example(_get, real(5, 4), -1),
    example(_get, real(5, 4, 3), (_ALL, 1)),
    example(_get, real(5, 4, 3), (Ellipsis, -1)),
    example(_get, real(5, 4), (slice(1, 4), None)),
    example(_get, real(5, 4), (slice(0, 5), slice(None, 2))),
    example(_get, real(7, 4), (slice(1, None, 2), None, _ALL)),
    example(_get, real(7, 8), (slice(None, None, 3), slice(-3, -1))),
    example(_get, real(5, 4), slice(3, 3)),
    example(_get, real(2, 4), (1, _ALL, None)),
    example(_get, real(5, 4), Ellipsis),
    example(_get, real(4), (2, None)),
    example(_get, whole(5, 4, dtype=torch.int32), 2),
    example(torch.select, real(5, 4), 1, -2),
    example(_T.select, real(5, 4), 0, 3),
    example(torch.narrow, real(5, 4), 0, 1, 3),
    example(torch.narrow, real(5, 4), 1, -2, 2),
    example(torch.narrow_copy, real(5, 4), 0, 1, 3),
    example(torch.narrow, real(5, 4), 0, 0, 5),
    example(_aten.slice.Tensor, real(5, 4), 0, 1, 2**63 - 1),
    example(_aten.slice.Tensor, real(5, 4), 1, 0, 9, 2),
)

_LOOKED_UP = (
    example(_get, real(5, 4), places(5, 6, negative=True)),
    example(_get, real(5, 4, 3), (_ALL, places(4, 2, 5))),
    example(_get, real(5, 4, 3), (places(5, 6), _ALL, places(3, 6))),
    example(_get, real(5, 4, 3), (_ALL, places(4, 6), places(3, 2, 1))),
    example(_get, real(5, 4, 3), (2, _ALL, places(3, 6))),
    example(_get, real(7, 4, 3), (slice(1, 6, 2), places(4, 5), None)),
    example(_get, real(5, 4, 3), (_ALL, None, places(4, 5), 1)),
    example(_get, real(5, 4), [0, -1, 3]),
    example(_get, real(5, 4), (_ALL, [1, 1])),
    example(_get, real(5, 4), ([0, 3], places(4, 5, 2))),
    example(_get, real(2, 4), places(2, 5)),
    example(_aten.index.Tensor, real(5, 4, 3), [None, places(4, 6)]),
    example(_aten.index.Tensor, real(5, 4), [places(5, 6), places(4, 6)]),
    example(torch.index_select, real(5, 4), 0, places(5, 7)),
    example(torch.index_select, real(2, 4, 3), -1, places(3, 7)),
    example(torch.index_select, real(2), 0, places(2, 7)),
    example(torch.gather, real(5, 4), 1, places(4, 5, 6)),
    example(torch.gather, real(5, 4, 3), 0, places(5, 6, 4, 2)),
    example(torch.gather, real(2, 5), 0, places(2, 3, 5)),
    example(torch.take_along_dim, real(5, 4), places(4, 5, 6), 1),
    example(torch.take_along_dim, real(5, 1), places(5, 1, 6), 0),
    example(torch.embedding, real(7, 4), places(7, 5, 3)),
    example(torch.embedding, real(7, 4), places(7, 9), 2),
    example(torch.embedding, real(2, 4), places(2, 5), padding_idx=1),
    example(torch.embedding, real(7, 4), places(7, 9), -1, True),
    example(torch._C._nn.one_hot, places(6, 5, 2), 6),
)

_WRITTEN = (
    example(_set, real(5, 4), 2, real(4)),
    example(_set, real(5, 4), (_ALL, 1), real(5)),
    example(_set, real(5, 4), (slice(1, 4), slice(0, 2)), real(3, 2)),
    example(_set, real(7, 4), slice(None, None, 2), real(4)),
    example(_set, real(7, 4), (slice(1, 6, 3), None), real(1, 2, 1, 4)),
    example(_set, real(5, 4, 3), (2, _ALL, -1), real(1)),
    example(_set, real(5, 4), (slice(0, 5), 1), 2.5),
    example(_set, real(5, 4), 1, 0),
    example(_set, real(5, 4), Ellipsis, real(1, 5, 1)),
    example(_set, real(4), 3, real()),
    example(_set, real(5, 4), slice(2, 2), real(4)),
    example(_set, real(5, 4), (_ALL, distinct(4, 3)), real(5, 3)),
    example(_set, real(5, 4), (distinct(5, 2),), real(4)),
    example(_set, real(5, 4, 3), (distinct(5, 2), _ALL, distinct(3, 2)), real(2, 4)),
    example(_set, real(5, 4, 3), (slice(1, 5, 2), None, distinct(4, 3), 1), real(2, 1, 3)),
    example(_set, real(2, 4), (distinct(2, 1),), 2.5),
    example(torch.index_put, real(5, 4), (places(5, 6),), real(6, 4), True),
    example(torch.index_put, real(5, 7), (places(5, 6), places(7, 2, 6)), real(6), True),
    example(torch.index_put, real(5, 4), (distinct(5, 3),), real(3, 1)),
    example(_T.index_put_, real(5, 4), (distinct(5, 3), distinct(4, 3)), real(3)),
    example(_aten.index_put.default, real(5, 4), [None, distinct(4, 3)], real(5, 3)),
    example(torch.index_add, real(5, 4), 0, places(5, 7), real(7, 4)),
    example(_T.index_add_, real(5, 4), 1, places(4, 7), real(5, 7), alpha=2),
    example(torch.index_add, real(2), 0, places(2, 7), real(7)),
    example(torch.index_copy, real(5, 4), 0, distinct(5, 3), real(3, 4)),
    example(_T.index_copy_, real(5, 4), 1, distinct(4, 3), real(5, 3)),
    example(torch.index_fill, real(5, 4), 0, places(5, 2), 2.5),
    example(torch.index_fill, real(5, 4), 1, places(4, 2), real()),
    example(torch.index_reduce, real(5, 4), 0, places(5, 7), real(7, 4), "amax"),
    example(
        torch.index_reduce, real(5, 4), 0, places(5, 7), real(7, 4), "prod", include_self=False
    ),
    example(
        torch.scatter, real(5, 4), 0, distinct(5, 3)[:, None].expand(3, 4).contiguous(), real(3, 4)
    ),
    example(torch.scatter, real(5, 4), 1, distinct(4, 2).expand(5, 2).contiguous(), 2.5),
    example(_T.scatter_, real(5, 4), 1, distinct(4, 2).expand(5, 2).contiguous(), value=2.5),
    example(
        torch.scatter, real(5, 4), 0, distinct(5, 3)[:, None].expand(3, 2).contiguous(), real(3, 2)
    ),
    example(torch.scatter_add, real(5, 4), 0, places(5, 7, 4), real(7, 4)),
    example(_T.scatter_add_, real(5, 4), 1, places(4, 5, 6), real(5, 6)),
    example(torch.scatter_add, real(2), 0, places(2, 6), real(6)),
    example(torch.scatter_reduce, real(5, 4), 0, places(5, 7, 4), real(7, 4), "amax"),
    example(
        torch.scatter_reduce, real(5, 4), 0, places(5, 7, 4), real(7, 4), "mean", include_self=False
    ),
    example(torch.scatter_reduce, real(5, 4), 1, places(4, 5, 7), real(5, 7), "prod"),
)

EXAMPLES = (*_BASIC, *_LOOKED_UP, *_WRITTEN)
