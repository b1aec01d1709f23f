"""Placement: the devices that hold a tensor, as a device type and an n-dimensional grid of ranks.

It is what other libraries call a device mesh. The grid's dims are *axes*. The order of ranks
matters: the k-th rank of an axis holds the k-th piece. A regular grid (``range``, nested ranges,
any evenly strided array) is stored as start and strides, so that a placement over 65,536 ranks
takes no more memory than one over two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .grid import as_grid, compress, coordinate_of_offset, dense_strides, ranks_text, unravel
from .sbp import Sbp
from .tracer import callbacks

_DEVICE_TYPES = ("cpu", "cuda")
_TYPE_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "cuda": "cuda", "cpu": "cpu", "host": "cpu"}


class World:
    """The number of ranks and their devices, against which a new placement is checked.

    Simulations, and programs whose ranks have not connected yet, have subclasses of it.
    """

    def size(self) -> int | None:
        """Return the number of ranks; None while ``torch.distributed`` is not initialized."""
        return dist.get_world_size() if dist.is_initialized() else None

    def has_gpus(self) -> bool:
        """Return whether this process sees GPUs; without them a placement of type "cuda" raises."""
        return torch.cuda.is_available()


_world_callbacks = callbacks("world")


def _world() -> World:
    """Return the world that placements are checked against.

    A tracer may give another one by its ``world`` callback, as a simulation does.
    """
    return _world_callbacks[-1]() if _world_callbacks else World()


class Placement:
    """Ranks that hold a tensor, as a grid (device mesh): ``placement(type, ranks, axes=None)``.

    Args:
        type: "cpu" or "cuda".
        ranks: world ranks as an int, a list, a nested list, a ``range`` or a numpy array of ints.
        axes: optional names, one per axis of the grid.

    Raises:
        ValueError: a rank occurs twice or is not in the world, or the list is empty or ragged.
        RuntimeError: ``type`` is "cuda" and there is no GPU.

    Placements are equal, and have equal hashes, if type, grid and axis names are equal.
    """

    # ``__dict__`` holds the cached properties. ``_table`` has all ranks of an irregular grid.
    __slots__ = ("type", "shape", "axes", "_start", "_strides", "_table", "__dict__")

    def __init__(self, type: str, ranks: Any, axes: Sequence[str] | None = None):  # noqa: A002
        _check_type(type)
        self.type = type
        grid = as_grid(ranks)
        self.shape: tuple[int, ...] = grid.shape if isinstance(grid, np.ndarray) else (len(grid),)
        self.axes = _check_axes(axes, self.shape)
        self._start, self._strides, self._table = compress(grid)
        self._check_ranks(ranks)

    @classmethod
    def all(cls, type: str) -> Placement:  # noqa: A003
        """Return a placement of all ranks of the world on one axis.

        Without ``torch.distributed`` the world is this one process.
        """
        return cls(type, range(_world().size() or 1))

    # -- the grid ----------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes of the grid."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def ranks(self) -> np.ndarray:
        """The grid as an int64 array; each access makes a new array."""
        if self._table is not None:
            return np.array(self._table, dtype=np.int64).reshape(self.shape)
        grid = np.full(self.shape, self._start, dtype=np.int64)
        for axis, stride in enumerate(self._strides):
            steps = np.arange(self.shape[axis], dtype=np.int64) * stride
            grid += steps.reshape([-1 if a == axis else 1 for a in range(self.ndim)])
        return grid

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the world rank at a grid coordinate."""
        if self._table is not None:
            return int(self._table[np.ravel_multi_index(tuple(coordinate), self.shape)])
        return self._start + sum(c * s for c, s in zip(coordinate, self._strides, strict=True))

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the grid coordinate of ``rank``; None if the grid does not contain it."""
        if self._table is not None:
            index = self._index_of_rank.get(rank)
            return None if index is None else unravel(index, self.shape)
        return coordinate_of_offset(rank - self._start, self.shape, self._strides)

    def axis_ranks(self, axis: int, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks along ``axis`` through ``coordinate``, in grid order.

        They are the group of a collective along that axis: in the grid [[0, 1], [2, 3]] those of
        axis 0 through (0, 1) are (1, 3).
        """
        point = list(coordinate)
        ranks = []
        for step in range(self.shape[axis]):
            point[axis] = step
            ranks.append(self.rank_at(point))
        return tuple(ranks)

    @cached_property
    def first_rank(self) -> int:
        """Rank at the grid's origin, the coordinate of zeros."""
        return self.rank_at((0,) * self.ndim)

    @cached_property
    def _index_of_rank(self) -> dict[int, int]:
        assert self._table is not None
        return {rank: index for index, rank in enumerate(self._table)}

    # -- comparing, printing, pickling, copying ----------------------------------------------------

    @cached_property
    def _key(self) -> tuple:
        return (self.type, self.shape, self.axes, self._start, self._strides, self._table)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Placement) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = f", axes={self.axes!r}" if self.axes else ""
        return f'placement("{self.type}", ranks={self._ranks_text()}{names})'

    def _ranks_text(self) -> str:
        if self._table is None and self.ndim == 1 and self.size > 8:
            step = self._strides[0]
            start, stop = self._start, self._start + step * self.size
            if step == 1:
                return f"range({stop})" if start == 0 else f"range({start}, {stop})"
            return f"range({start}, {stop}, {step})"
        if self._table is None and self.size > 64 and self._strides == dense_strides(self.shape):
            ends = f"{self._start}, " if self._start else ""
            sizes = ", ".join(map(str, self.shape))
            return f"np.arange({ends}{self._start + self.size}).reshape({sizes})"
        return repr(self.ranks.tolist())

    def __reduce__(self) -> tuple:
        ranks: Any = self.ranks
        if self._table is None and self.ndim == 1:
            step = self._strides[0]
            ranks = range(self._start, self._start + step * self.size, step)
        return (Placement, (self.type, ranks, self.axes))

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: dict) -> Placement:
        return self

    # -- checks ------------------------------------------------------------------------------------

    def _rank_bounds(self) -> tuple[int, int]:
        """Return the lowest and the highest rank of the grid."""
        if self._table is not None:
            return min(self._table), max(self._table)
        spans = [(n - 1) * s for n, s in zip(self.shape, self._strides, strict=True)]
        return (
            self._start + sum(min(0, span) for span in spans),
            self._start + sum(max(0, span) for span in spans),
        )

    def _check_ranks(self, ranks: Any) -> None:
        repeated = self._repeated_rank()
        if repeated is not None:
            raise ValueError(
                f"placement: rank {repeated} stands twice in ranks={ranks_text(ranks)}, and a "
                "rank holds one piece of a tensor. Name each rank once."
            )
        low, high = self._rank_bounds()
        world = _world().size()
        if low < 0 or (world is not None and high >= world):
            bad_rank = low if low < 0 else high
            size = f"the world has {world} ranks (0 to {world - 1})" if world else ""
            raise ValueError(
                f"placement: rank {bad_rank} in ranks={ranks_text(ranks)} lies outside the world: "
                f"{size or 'ranks count from 0'}. "
                "Use ranks of the world, or launch more processes (torchrun --nproc_per_node N)."
                + (
                    f" The first {ranks} ranks are range({ranks})."
                    if isinstance(ranks, int) and ranks > 0
                    else ""
                )
            )

    def _repeated_rank(self) -> int | None:
        """Return a rank that is in the grid twice, or None."""
        if self._table is not None:
            seen: set[int] = set()
            for rank in self._table:
                if rank in seen:
                    return rank
                seen.add(rank)
            return None
        # A strided grid repeats a rank only if some stride is within the span of the smaller ones.
        # Only then are the ranks listed, which takes memory for each of them.
        reach = 1
        by_stride = sorted(zip(map(abs, self._strides), self.shape, strict=True))
        for stride, n in by_stride:
            if n > 1 and stride < reach:
                flat = self.ranks.ravel()
                values, counts = np.unique(flat, return_counts=True)
                repeated = values[counts > 1]
                return int(repeated[0]) if len(repeated) else None
            reach += (n - 1) * stride
        return None


def _check_type(type: str) -> None:  # noqa: A002
    if type not in _DEVICE_TYPES:
        alias = _TYPE_ALIASES.get(str(type).partition(":")[0].lower())
        raise ValueError(
            f'placement: type is {type!r}, which is not a device type. Use "cpu" or "cuda".'
            + (
                f" Did you mean {alias!r}? Which device a rank has is its own affair."
                if alias
                else ""
            )
        )
    if type == "cuda" and not _world().has_gpus():
        raise RuntimeError(
            'placement: type is "cuda", and this process sees no GPU '
            "(torch.cuda.is_available() is False). "
            'Use type="cpu", or run where a GPU and a CUDA build of torch are present.'
        )


def check_placement(what: str, given: object) -> None:
    """Raise a TypeError if ``given`` is not a placement; the message says how to write one."""
    if isinstance(given, Placement):
        return
    advice = 'Write placement("cpu", ranks=[0, 1]).'
    if isinstance(given, Sbp | int | str) and not isinstance(given, bool):
        advice += " An SBP is given by its name: sbp=S(0)."
    elif hasattr(given, "mesh_dim_names") and hasattr(given, "device_type"):  # a DeviceMesh
        names = given.mesh_dim_names and tuple(given.mesh_dim_names)  # type: ignore[attr-defined]
        axes = f", axes={names!r}" if names else ""
        ranks = given.mesh.tolist()  # type: ignore[attr-defined]
        advice = f'Write placement("{given.device_type}", {ranks}{axes}).'  # type: ignore[attr-defined]
    raise TypeError(
        f"{what}: placement is {given!r} of type {type(given).__name__}, which is not a "
        f"placement. {advice}"
    )


def _check_axes(axes: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if axes is None:
        return None
    if isinstance(axes, str):
        raise ValueError(f"placement: axes={axes!r} is one text; give names: axes=({axes!r},).")
    names = tuple(axes)
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ValueError(
            f"placement: axes={names!r} do not fit a grid of {len(shape)} axes {shape}: "
            "give one name per axis, each once."
        )
    return names
