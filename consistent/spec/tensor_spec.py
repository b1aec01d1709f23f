"""TensorSpec: everything about a global tensor but its data, and what each rank holds of it.

A spec is (placement, sbp, logical shape, dtype). Specs are interned: equal specs are the same
object, so the dispatch cache compares and hashes them by identity.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

import torch

from .placement import Placement
from .sbp import NdSbp, P, SbpLike, Split, as_nd_sbp, dual_nd, is_one_way, may_be

Coordinate = tuple[int, ...]

_SHORT_DTYPE = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def piece(n: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of piece ``index`` of ``n`` items cut balanced into ``parts``.

    With n = q * parts + r the first r pieces hold q + 1 items and the others q, so pieces may be
    empty.
    """
    q, r = divmod(n, parts)
    return index * q + min(index, r), q + (index < r)


class TensorSpec:
    """(placement, sbp, shape, dtype) of one global tensor. Make one with ``TensorSpec.of``."""

    __slots__ = ("placement", "sbp", "shape", "dtype", "ndim", "_dual", "_boxes", "__weakref__")

    placement: Placement
    sbp: NdSbp
    shape: torch.Size
    dtype: torch.dtype
    ndim: int
    _dual: TensorSpec | None
    _boxes: dict

    @staticmethod
    def of(
        placement: Placement, sbp: SbpLike, shape: Sequence[int], dtype: torch.dtype
    ) -> TensorSpec:
        """The spec with these values. SBP entries are checked and negative dims resolved.

        Raises:
            ValueError: the number of SBPs is not the number of axes, a split dim is out of range,
                axes are partial in two ways, or a size is negative.
        """
        size = torch.Size(shape)
        if size and min(size) < 0:
            raise ValueError(
                f"spec: shape {tuple(size)} has a negative size, and a tensor holds 0 items or "
                "more along a dim. Give the logical shape of the whole tensor."
            )
        return _intern(placement, resolve_sbp(sbp, placement, size), size, dtype)

    # -- variations --------------------------------------------------------------------------------

    def with_sbp(self, sbp: NdSbp) -> TensorSpec:
        """The same tensor under another, already resolved, nd-sbp."""
        return self if sbp == self.sbp else _intern(self.placement, sbp, self.shape, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> TensorSpec:
        """The same layout for another dtype."""
        if dtype == self.dtype:
            return self
        return _intern(self.placement, self.sbp, self.shape, dtype)

    @property
    def dual(self) -> TensorSpec:
        """The spec of this tensor's gradient."""
        if self._dual is None:
            self._dual = self.with_sbp(dual_nd(self.sbp))
        return self._dual

    # -- what each rank holds ----------------------------------------------------------------------

    def box(self, coordinate: Coordinate | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(starts, sizes) of the box of the logical tensor that the rank at ``coordinate`` holds.

        A rank outside the placement (None) follows the program with a ``meta`` shard that has the
        shape of the shard at the grid's origin.
        """
        made = self._boxes.get(coordinate)
        if made is None:
            at = (0,) * self.placement.ndim if coordinate is None else coordinate
            made = self._boxes[coordinate] = self._box(at)
        return made

    def _box(self, coordinate: Coordinate) -> tuple[tuple[int, ...], tuple[int, ...]]:
        starts, sizes = [0] * self.ndim, list(self.shape)
        for axis, entry in enumerate(self.sbp):
            if isinstance(entry, Split):
                dim = entry.dim
                start, sizes[dim] = piece(sizes[dim], self.placement.shape[axis], coordinate[axis])
                starts[dim] += start
        return tuple(starts), tuple(sizes)

    def local_shape(self, coordinate: Coordinate | None) -> tuple[int, ...]:
        """Shape of the shard at ``coordinate``."""
        return self.box(coordinate)[1]

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor."""
        return self.numel * self.dtype.itemsize

    # -- as a value --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        name = _SHORT_DTYPE.get(self.dtype, str(self.dtype).removeprefix("torch."))
        shown = self.sbp[0] if len(self.sbp) == 1 else self.sbp
        return f"{name}{list(self.shape)} {shown} on {self.placement}"

    def __reduce__(self) -> tuple:
        return (TensorSpec.of, (self.placement, self.sbp, tuple(self.shape), self.dtype))

    def __copy__(self) -> TensorSpec:
        return self

    def __deepcopy__(self, memo: dict) -> TensorSpec:
        return self


# Weak, so that a program that meets ever new shapes does not grow without bound.
_interned: weakref.WeakValueDictionary[tuple, TensorSpec] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _intern(placement: Placement, sbp: NdSbp, shape: torch.Size, dtype: torch.dtype) -> TensorSpec:
    key = (placement, sbp, shape, dtype)
    spec = _interned.get(key)
    if spec is None:
        with _lock:  # backward may make specs from an autograd thread
            spec = _interned.get(key)
            if spec is None:
                spec = object.__new__(TensorSpec)
                spec.placement, spec.sbp, spec.shape, spec.dtype = key
                spec.ndim = len(shape)
                spec._dual = None
                spec._boxes = {}
                _interned[key] = spec
    return spec


def resolve_sbp(sbp: SbpLike, placement: Placement, shape: Sequence[int]) -> NdSbp:
    """``sbp`` as one entry per axis of ``placement``, with dims counted from the front."""
    entries = as_nd_sbp(sbp)
    if len(entries) != placement.ndim:
        raise ValueError(
            f"sbp: {_shown(entries)} has {len(entries)} entries, and {placement} has "
            f"{placement.ndim} axes {placement.shape}. Give one SBP per axis, such as "
            f"({', '.join(['B'] * placement.ndim)}{',' if placement.ndim == 1 else ''})."
        )
    if not is_one_way(entries):
        raise ValueError(
            f"sbp: {_shown(entries)} is partial in two ways, and the largest of sums is no sum of "
            "the largest. Use one kind of P on all partial axes, and B or S on the others."
        )
    return tuple(
        _resolve(entry, len(shape), shape) if isinstance(entry, Split) else entry
        for entry in entries
    )


def misfit(spec: TensorSpec) -> str | None:
    """Why a tensor of this dtype cannot be partial as ``spec`` says; None if it can."""
    for entry in spec.sbp:
        if not may_be(entry, spec.dtype):
            lacks = "truth values have no sum" if entry is P else "complex numbers have no order"
            return f"a tensor of {spec.dtype} cannot be {entry}, for {lacks}"
    return None


def _resolve(entry: Split, ndim: int, shape: Sequence[int]) -> Split:
    if 0 <= entry.dim < ndim:
        return entry
    if not -ndim <= entry.dim < ndim:
        reach = f"dims {-ndim} to {ndim - 1}" if ndim else "no dim to split"
        raise ValueError(
            f"sbp: {entry} splits dim {entry.dim} of a tensor of shape {tuple(shape)}, which has "
            f"{reach}. Split one of its dims, or use B."
        )
    return Split(entry.dim + ndim)


def _shown(entries: NdSbp) -> str:
    return str(entries[0]) if len(entries) == 1 else str(entries)
