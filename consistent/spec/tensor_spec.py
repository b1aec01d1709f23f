"""Specs of global tensors: everything but the data, and from it what each rank holds.

A spec is (placement, sbp, logical shape, dtype). The first two are its ``Layout``, which says how
ranks hold a tensor of any size. Specs and layouts are interned: equal ones are the same object, so
the dispatch cache compares and hashes them by identity.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Sequence

import torch

from .cut import Runs, item_count, piece
from .placement import Placement
from .sbp import (
    B,
    NdSbp,
    P,
    SbpLike,
    Split,
    as_nd_sbp,
    dual_nd,
    fits_dtype,
    has_one_partial_kind,
    is_cut,
    sbp_text,
    without_cuts,
)

Coordinate = tuple[int, ...]

_SHORT_DTYPE = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


class Layout:
    """Placement and nd-sbp (SBP per axis): how ranks hold tensors of any size.

    Make one with ``Layout.of``.
    """

    __slots__ = ("placement", "sbp", "is_whole", "is_cut", "parts", "__weakref__")

    placement: Placement
    sbp: NdSbp
    is_whole: bool  # every rank of the placement has the whole tensor
    is_cut: bool  # a dim is split into pieces that are not balanced
    # For each dim up to the last split one: the fewest items with which no rank has an empty shard.
    parts: tuple[int, ...]

    @staticmethod
    def of(placement: Placement, sbp: NdSbp) -> Layout:
        """Return the one layout object with these values.

        ``sbp`` has one SBP for each axis, with dims counted from the front, as ``resolve_sbp``
        returns.
        """
        key = (placement, sbp)
        layout = _layouts.get(key)
        if layout is None:
            with _lock:
                layout = _layouts.get(key)
                if layout is None:
                    layout = object.__new__(Layout)
                    layout.placement, layout.sbp = key
                    layout.is_whole = all(entry.is_broadcast for entry in sbp)
                    layout.is_cut = is_cut(sbp)
                    layout.parts = _min_dim_sizes(placement, sbp)
                    _layouts[key] = layout
        return layout

    @staticmethod
    def whole(placement: Placement) -> Layout:
        """Return the layout in which every rank of ``placement`` has the whole tensor (B)."""
        return Layout.of(placement, (B,) * placement.ndim)

    def has_empty_shards(self, shape: Sequence[int]) -> bool:
        """Return whether some rank has an empty shard of a tensor of ``shape`` that is not empty.

        The library checks this where an op could raise an error on some ranks only.
        """
        is_short = any(size < parts for size, parts in zip(shape, self.parts))
        return is_short and math.prod(shape) > 0

    def __repr__(self) -> str:
        return f"{sbp_text(self.sbp)} on {self.placement}"

    def __reduce__(self) -> tuple:
        return (Layout.of, (self.placement, self.sbp))

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict) -> Layout:
        return self


class TensorSpec:
    """Placement, SBP of each axis, logical shape and dtype of one global tensor.

    Specs are interned, so that equal ones are the same object. Make one with ``TensorSpec.of``.
    """

    __slots__ = (
        "layout", "placement", "sbp", "shape", "dtype", "ndim",
        "_dual", "_settled", "_others", "_regions", "_largest_nbytes", "__weakref__",
    )  # fmt: skip

    layout: Layout
    placement: Placement
    sbp: NdSbp
    shape: torch.Size
    dtype: torch.dtype
    ndim: int
    _dual: TensorSpec | None
    _settled: TensorSpec | None
    _others: dict[NdSbp, TensorSpec]  # cache of ``with_sbp``
    _regions: dict  # cache of ``region``, by coordinate
    _largest_nbytes: int | None

    @staticmethod
    def of(
        placement: Placement, sbp: SbpLike, shape: Sequence[int], dtype: torch.dtype
    ) -> TensorSpec:
        """Return the one spec object with these values, after checking them.

        Negative dims are resolved: ``sbp`` may have any form that a user may pass, such as
        ``"S(-1)"``.

        Raises:
            ValueError: the number of SBPs is not the number of axes, a split dim is out of range,
                axes are partial in two ways, a cut does not fit its dim, or a size is negative.
        """
        size = torch.Size(shape)
        if size and min(size) < 0:
            raise ValueError(
                f"spec: shape {tuple(size)} has a negative size, and a tensor holds 0 items or "
                "more along a dim. Give the logical shape of the whole tensor."
            )
        return _intern(Layout.of(placement, resolve_sbp(sbp, placement, size)), size, dtype)

    @staticmethod
    def laid(layout: Layout, shape: torch.Size, dtype: torch.dtype) -> TensorSpec:
        """Return the spec with this layout, which must fit the shape.

        Unlike ``of`` it checks nothing, and is faster.
        """
        return _intern(layout, shape, dtype)

    # -- variations --------------------------------------------------------------------------------

    def with_sbp(self, sbp: NdSbp) -> TensorSpec:
        """Return the spec of the same tensor with other SBPs, as ``resolve_sbp`` returns them."""
        if sbp == self.sbp:
            return self
        spec = self._others.get(sbp)
        if spec is None:
            spec = self._others[sbp] = self.with_layout(Layout.of(self.placement, sbp))
        return spec

    def with_layout(self, layout: Layout) -> TensorSpec:
        """Return the spec of the same tensor in another layout, which must fit its shape."""
        return self if layout is self.layout else _intern(layout, self.shape, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> TensorSpec:
        """Return the same spec with another dtype."""
        if dtype == self.dtype:
            return self
        return _intern(self.layout, self.shape, dtype)

    @property
    def dual(self) -> TensorSpec:
        """Spec in which this tensor's gradient is computed: P for B, B for P, S for S."""
        if self._dual is None:
            self._dual = self.with_sbp(dual_nd(self.sbp))
        return self._dual

    @property
    def settled(self) -> TensorSpec:
        """Spec of the gradient of a leaf with this spec, as it is in ``.grad`` after backward.

        It is the spec of the leaf, with B where the leaf is P.
        """
        if self._settled is None:
            self._settled = self.with_sbp(tuple(B if e.is_partial else e for e in self.sbp))
        return self._settled

    # -- shards ------------------------------------------------------------------------------------

    def region(self, coordinate: Coordinate | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (starts, sizes) of the box of the logical tensor that a rank holds.

        [5, 4] under S(0) on 2 ranks gives ((3, 0), (2, 4)) at coordinate (1,). A rank outside the
        placement (``coordinate`` None) has a ``meta`` shard with the shape of that at the grid's
        origin.

        Raises:
            ValueError: the layout has a cut, so a shard may be several runs; ``runs`` returns
                these.
        """
        box = self._regions.get(coordinate)
        if box is None:
            position = (0,) * self.placement.ndim if coordinate is None else coordinate
            box = self._regions[coordinate] = self._region(position)
        return box

    def _region(self, coordinate: Coordinate) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.layout.is_cut:
            raise ValueError(
                f"spec: {self} is no one box on each rank, for a cut may deal out several runs. "
                "Box it to a plain split first: "
                f"x.to_global(sbp={sbp_text(self.plain.sbp)})."
            )
        starts, sizes = [0] * self.ndim, list(self.shape)
        for axis, entry in enumerate(self.sbp):
            if isinstance(entry, Split):
                dim = entry.dim
                start, sizes[dim] = piece(sizes[dim], self.placement.shape[axis], coordinate[axis])
                starts[dim] += start
        return tuple(starts), tuple(sizes)

    def local_shape(self, coordinate: Coordinate | None) -> tuple[int, ...]:
        """Return the shape of the shard of the rank at ``coordinate``.

        None, for a rank outside the placement, means the shard at the grid's origin.
        """
        if not self.layout.is_cut:
            return self.region(coordinate)[1]
        return tuple(map(item_count, self.runs(coordinate)))

    def runs(self, coordinate: Coordinate | None) -> tuple[Runs, ...]:
        """Return for each dim the runs of items that the rank at ``coordinate`` holds.

        A run is (start, size); the shard stores the runs one after the other. Without a cut each
        dim has one run, as in ``region``.
        """
        if not self.layout.is_cut:
            return tuple((run,) for run in zip(*self.region(coordinate)))
        position = (0,) * self.placement.ndim if coordinate is None else coordinate
        runs_by_dim: list[Runs] = [((0, n),) for n in self.shape]
        for parts, index, entry in zip(self.placement.shape, position, self.sbp):
            if isinstance(entry, Split):
                # One run: a cut is the last split of its dim.
                ((first, n),) = runs_by_dim[entry.dim]
                runs = entry.runs(n, parts, index)
                runs_by_dim[entry.dim] = tuple((first + start, size) for start, size in runs)
        return tuple(runs_by_dim)

    @property
    def plain(self) -> TensorSpec:
        """Spec of this tensor with balanced splits in place of cuts such as zigzag."""
        return self.with_sbp(without_cuts(self.sbp)) if self.layout.is_cut else self

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest shard of any rank."""
        if self._largest_nbytes is None:
            # The first of balanced pieces is the largest; given sizes may put it anywhere.
            coordinates: Iterable[Coordinate] = [(0,) * self.placement.ndim]
            if self.layout.is_cut:
                coordinates = itertools.product(*map(range, self.placement.shape))
            numel = max(math.prod(self.local_shape(each)) for each in coordinates)
            self._largest_nbytes = numel * self.dtype.itemsize
        return self._largest_nbytes

    # -- printing, pickling, copying ---------------------------------------------------------------

    def __repr__(self) -> str:
        name = _SHORT_DTYPE.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}{list(self.shape)} {self.layout}"

    def __reduce__(self) -> tuple:
        return (TensorSpec.of, (self.placement, self.sbp, tuple(self.shape), self.dtype))

    def __copy__(self) -> TensorSpec:
        return self

    def __deepcopy__(self, memo: dict) -> TensorSpec:
        return self


# Weak values, so that memory stays bounded if a program keeps using new shapes.
_layouts: weakref.WeakValueDictionary[tuple, Layout] = weakref.WeakValueDictionary()
_interned: weakref.WeakValueDictionary[tuple, TensorSpec] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def _intern(layout: Layout, shape: torch.Size, dtype: torch.dtype) -> TensorSpec:
    """Return the one object for this spec, which is made at the first call."""
    key = (layout, shape, dtype)
    spec = _interned.get(key)
    if spec is None:
        # Look again under the lock: an autograd thread may make the same spec in backward, and two
        # objects for equal specs would break comparison by identity.
        with _lock:
            spec = _interned.get(key)
            if spec is None:
                spec = object.__new__(TensorSpec)
                spec.layout, spec.shape, spec.dtype = key
                spec.placement, spec.sbp, spec.ndim = layout.placement, layout.sbp, len(shape)
                spec._dual = spec._settled = spec._largest_nbytes = None
                spec._others, spec._regions = {}, {}
                _interned[key] = spec
    return spec


def resolve_sbp(sbp: SbpLike, placement: Placement, shape: Sequence[int]) -> NdSbp:
    """Return ``sbp`` as one entry per axis of ``placement``, with dims counted from the front.

    ``sbp`` may have any form that a user may pass, such as ``"S(-1)"``.

    Raises:
        ValueError: ``sbp`` does not fit the placement or the number of dims, or a cut does not fit
            the sizes.
    """
    resolved = resolve_dims(sbp, placement, shape)
    fault = invalid_cut_reason(resolved, placement, shape)
    if fault is not None:
        raise ValueError(f"sbp: {fault}")
    return resolved


def resolve_dims(sbp: SbpLike, placement: Placement, shape: Sequence[int]) -> NdSbp:
    """Resolve ``sbp`` as ``resolve_sbp`` does, but without checking that cuts fit the sizes.

    Use it where sizes are not known yet: only the length of ``shape``, the number of dims, must be
    correct.
    """
    entries = as_nd_sbp(sbp)
    if len(entries) != placement.ndim:
        raise ValueError(
            f"sbp: {sbp_text(entries)} has {len(entries)} entries, and {placement} has "
            f"{placement.ndim} axes {placement.shape}. Give one SBP per axis, such as "
            f"({', '.join(['B'] * placement.ndim)}{',' if placement.ndim == 1 else ''})."
        )
    if not has_one_partial_kind(entries):
        raise ValueError(
            f"sbp: {sbp_text(entries)} is partial in two ways, and the largest of sums is not a "
            "sum of the largest. Use one kind of P on all partial axes, and B or S on the others."
        )
    return tuple(
        _resolve_dim(entry, len(shape), shape) if isinstance(entry, Split) else entry
        for entry in entries
    )


def invalid_cut_reason(entries: NdSbp, placement: Placement, shape: Sequence[int]) -> str | None:
    """Return the reason why the cuts in ``entries`` cannot divide a tensor of ``shape``, else None.

    ``S(0, sizes=(3, 5))`` cannot divide 9 items, for example. ``entries`` are the SBPs of the first
    axes of ``placement``. The text becomes part of an error.
    """
    if not is_cut(entries):
        return None
    sizes: dict[int, set[int]] = {}  # dim -> the sizes of its pieces after the axes so far
    cut_dims: set[int] = set()  # dims that are cut, which no further axis may split
    for entry, ranks in zip(entries, placement.shape):
        if not isinstance(entry, Split):
            continue
        dim, cut = entry.dim, entry.cut
        if dim in cut_dims:
            return (
                f"{sbp_text(entries)} splits dim {dim} further where it is cut, and the pieces of "
                f"{Split(dim, cut)} are no runs. Cut on the last of the axes that split the dim, "
                "or use B on the other axis."
            )
        piece_sizes = sizes.get(dim, {shape[dim]})
        if cut is None:
            # Balanced pieces have at most two sizes: that of the first one, and one less.
            sizes[dim] = {n for m in piece_sizes for n in (piece(m, ranks, 0)[1], m // ranks)}
            continue
        cut_dims.add(dim)
        for n in sorted(piece_sizes):
            reason = cut.invalid_reason(n, ranks)
            if reason is not None:
                return (
                    f"{entry} does not fit dim {dim} of a tensor of shape {tuple(shape)}, for "
                    f"{reason}. Give sizes that add up to the dim, or a plain S({dim})."
                )
    return None


def _min_dim_sizes(placement: Placement, sbp: NdSbp) -> tuple[int, ...]:
    """Return the value of ``Layout.parts``: for each dim the fewest items that reach all ranks."""
    parts = [1] * (1 + max((e.dim for e in sbp if isinstance(e, Split)), default=-1))
    for entry, ranks in zip(sbp, placement.shape, strict=True):
        if isinstance(entry, Split):
            parts[entry.dim] *= ranks if entry.cut is None else entry.cut.min_items(ranks)
    return tuple(parts)


def invalid_dtype_reason(spec: TensorSpec) -> str | None:
    """Return the reason why a tensor of this dtype cannot have the SBPs of ``spec``, else None.

    Bools have no sum, so they cannot be P, and complex numbers have no order, so they cannot be
    P(max) or P(min). The text becomes part of an error.
    """
    for entry in spec.sbp:
        if not fits_dtype(entry, spec.dtype):
            reason = "truth values have no sum" if entry is P else "complex numbers have no order"
            return f"a tensor of {spec.dtype} cannot be {entry}, for {reason}"
    return None


def _resolve_dim(entry: Split, ndim: int, shape: Sequence[int]) -> Split:
    """Return ``entry`` with its dim counted from the front: S(-1) in 2 dims is S(1)."""
    if 0 <= entry.dim < ndim:
        return entry
    if not -ndim <= entry.dim < ndim:
        dims = f"dims {-ndim} to {ndim - 1}" if ndim else "no dim to split"
        raise ValueError(
            f"sbp: {entry} splits dim {entry.dim} of a tensor of shape {tuple(shape)}, which has "
            f"{dims}. Split one of its dims, or use B."
        )
    return Split(entry.dim + ndim, entry.cut)
