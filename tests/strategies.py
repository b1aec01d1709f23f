"""Hypothesis strategies: shapes, grids, placements, SBPs and specs. They shrink to one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from consistent.spec import (
    EXTREMES,
    B,
    DimCut,
    NdSbp,
    P,
    Placement,
    S,
    Sbp,
    Split,
    TensorSpec,
    invalid_cut_reason,
)
from consistent.spec.cut import cut_of

# No deadline: the first example compiles and starts threads, so its time says nothing.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

GRIDS = [(1,), (2,), (3,), (4,), (2, 1), (1, 3), (2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)]
GRIDS_8 = [*GRIDS, (5,), (2, 3), (3, 2), (2, 4), (2, 2, 2), (2, 3, 1)]


def shapes(
    min_dims: int = 0, max_dims: int = 3, max_size: int = 9
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with sizes from 0, which split evenly, unevenly and into empty pieces on the grids."""
    sizes = st.one_of(st.integers(1, max_size), st.integers(0, max_size))
    return st.lists(sizes, min_size=min_dims, max_size=max_dims).map(tuple)


def grids(
    max_ranks: int = 4, axes: Sequence[int] = (1, 2, 3)
) -> st.SearchStrategy[tuple[int, ...]]:
    """Grids of at most ``max_ranks`` ranks (8 at most), some with axes of one rank."""
    return st.sampled_from([g for g in GRIDS_8 if math.prod(g) <= max_ranks and len(g) in axes])


@st.composite
def rank_grids(draw: st.DrawFn) -> list:
    """Nested lists of ranks: regular with any start and strides, permuted, or with gaps."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = int(np.prod(shape))
    if draw(st.booleans()):
        step, start = draw(st.integers(1, 3)), draw(st.integers(0, 9))
        flat = np.arange(count) * step + start
        return np.transpose(flat.reshape(shape), draw(st.permutations(range(len(shape))))).tolist()
    return np.array(draw(st.permutations(range(count + 3)))[:count]).reshape(shape).tolist()


@st.composite
def placements(
    draw: st.DrawFn, max_ranks: int = 4, axes: Sequence[int] = (1, 2, 3), permuted: bool = True
) -> Placement:
    """CPU placements over ranks 0 to n-1, in order or in any other."""
    grid = draw(grids(max_ranks, axes))
    ranks = list(range(math.prod(grid)))
    if permuted and draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return Placement("cpu", torch.tensor(ranks).reshape(grid).tolist())


def sbps(ndim: int, partial: Sbp | None = P) -> st.SearchStrategy[Sbp]:
    """One SBP for a tensor of ``ndim`` dims."""
    partials = [] if partial is None else [partial]
    return st.sampled_from([B, *partials, *(S(dim) for dim in range(ndim))])


def cuts(n: int, parts: int) -> st.SearchStrategy[DimCut]:
    """Any way to cut a dim of ``n`` items over ``parts`` ranks, pieces of no item included."""
    return st.one_of(st.just(n), _divisors(n), _sums(n)).flatmap(
        lambda of: _cuts_of(n, parts, None if of == n else of)
    )


def _cuts_of(n: int, parts: int, of: int | tuple[int, ...] | None) -> st.SearchStrategy[DimCut]:
    within = n if of is None else of if isinstance(of, int) else None
    found = [
        st.integers(1, max(1, n)).map(lambda b: cut_of(blocks=b, of=of)),
        st.just(cut_of(cut="zigzag", of=of)),
    ]
    if of is not None:
        found.append(st.just(cut_of(of=of)))
    if within is not None:
        found.append(_sums(within, parts).map(lambda sizes: cut_of(sizes=sizes, of=of)))
    return st.one_of(found)  # type: ignore[arg-type]


def _divisors(n: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, max(1, n) + 1) if n % d == 0])


@st.composite
def _sums(draw: st.DrawFn, n: int, count: int | None = None) -> tuple[int, ...]:
    """Sizes from 0 that add up to ``n``."""
    count = draw(st.integers(1, 3)) if count is None else count
    ends = sorted(draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, n]))


@st.composite
def with_cuts(draw: st.DrawFn, spec: TensorSpec) -> TensorSpec:
    """``spec`` with some of its splits cut in other ways, the last one of a dim each."""
    sbp, found = list(spec.sbp), spec
    for axis, entry in enumerate(spec.sbp):
        last = all(not (isinstance(e, Split) and e == entry) for e in spec.sbp[axis + 1 :])
        if isinstance(entry, Split) and last and draw(st.booleans()):
            n = found.with_sbp((*spec.sbp[:axis], *[B] * (len(sbp) - axis))).local_shape(None)
            cut = draw(cuts(n[entry.dim], spec.placement.shape[axis]))
            sbp[axis] = Split(entry.dim, cut)
            if invalid_cut_reason(tuple(sbp), spec.placement, spec.shape) is not None:
                sbp[axis] = entry  # another piece is one item shorter
    return TensorSpec.of(spec.placement, tuple(sbp), spec.shape, spec.dtype)


def cut_pairs(**kinds: Any) -> st.SearchStrategy[tuple[TensorSpec, TensorSpec]]:
    """``spec_pairs`` with cuts."""
    return spec_pairs(**kinds).flatmap(lambda pair: st.tuples(*map(with_cuts, pair)))


def any_sbps() -> st.SearchStrategy[Sbp]:
    """Any SBP that can be written, whatever the tensor."""
    return st.one_of(st.sampled_from([B, P, *EXTREMES]), st.integers(-5, 12).map(S))


def nd_sbps(axes: int, ndim: int, partials: Sequence[Sbp] = (P,)) -> st.SearchStrategy[NdSbp]:
    """One SBP for each of ``axes``. Axes may split the same dim; all partial ones are of one
    kind."""
    return st.sampled_from([*partials, None]).flatmap(
        lambda partial: st.tuples(*[sbps(ndim, partial)] * axes)
    )


@st.composite
def specs(
    draw: st.DrawFn,
    max_ranks: int = 4,
    axes: Sequence[int] = (1, 2, 3),
    dtype: torch.dtype = torch.float64,
    partials: Sequence[Sbp] = (P, *EXTREMES),
) -> TensorSpec:
    """A spec of any placement, SBP and shape."""
    placement, shape = draw(placements(max_ranks, axes)), draw(shapes())
    return TensorSpec.of(
        placement, draw(nd_sbps(placement.ndim, len(shape), partials)), shape, dtype
    )


@st.composite
def spec_pairs(
    draw: st.DrawFn,
    max_ranks: int = 4,
    axes: Sequence[int] = (1, 2, 3),
    dtype: torch.dtype = torch.float64,
    partials: Sequence[Sbp] = (P, *EXTREMES),
) -> tuple[TensorSpec, TensorSpec]:
    """Two specs of one tensor on one placement: the one it has and the one it should get."""
    src = draw(specs(max_ranks, axes, dtype, partials))
    return src, src.with_sbp(draw(nd_sbps(src.placement.ndim, src.ndim, partials)))
