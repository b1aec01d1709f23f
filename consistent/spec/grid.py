"""Grids of ranks: parsing what a user passes, and storing regular grids as start and strides."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def as_grid(ranks: Any) -> range | np.ndarray:
    """Return the ranks that a user passed as an int64 array, or as the ``range`` that they are.

    Raises:
        ValueError: they are empty, not ints, or rows of different lengths.
    """
    if isinstance(ranks, range):
        if len(ranks) == 0:
            raise _empty_error(ranks)
        return ranks
    try:
        grid = np.asarray(ranks)
    except ValueError as error:
        raise ValueError(
            f"placement: ranks={ranks_text(ranks)} is not a grid: its rows have different lengths. "
            "Give every row the same number of ranks."
        ) from error
    if grid.ndim == 0:
        grid = grid.reshape(1)
    if grid.size == 0:
        raise _empty_error(ranks)
    if not np.issubdtype(grid.dtype, np.integer):
        raise ValueError(
            f"placement: ranks={ranks_text(ranks)} holds {grid.dtype}, and ranks are ints. "
            "Give an int, a list, a nested list, a range or an int array."
        )
    return grid.astype(np.int64, copy=False)


def _empty_error(ranks: Any) -> ValueError:
    return ValueError(f"placement: ranks={ranks_text(ranks)} is empty. Name at least one rank.")


def compress(grid: range | np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...] | None]:
    """Return (start, strides, None) for an evenly strided grid, else (0, (), all ranks row by row).

    [[0, 1], [4, 5]] gives (0, (4, 1), None). A placement stores its grid in this form, whose memory
    does not grow with the number of ranks. An axis of one rank has stride 1.
    """
    if isinstance(grid, range):
        return grid.start, (grid.step if len(grid) > 1 else 1,), None
    # Read the strides off the first two ranks of each axis, then compare all ranks with them.
    start = int(grid.flat[0])
    strides = []
    expected = np.full(grid.shape, start, dtype=np.int64)
    for axis, n in enumerate(grid.shape):
        origin = [0] * grid.ndim
        if n > 1:
            origin[axis] = 1
        stride = int(grid[tuple(origin)]) - start if n > 1 else 1
        strides.append(stride)
        shape = [-1 if a == axis else 1 for a in range(grid.ndim)]
        expected = expected + (np.arange(n, dtype=np.int64) * stride).reshape(shape)
    if np.array_equal(expected, grid):
        return start, tuple(strides), None
    return 0, (), tuple(int(rank) for rank in grid.ravel())


def coordinate_of_offset(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the coordinate c with sum(c * strides) == ``offset``; None if the grid has none.

    It finds a rank in a strided grid. The search goes from the widest stride to the narrowest, and
    tries only steps whose remainder the narrower strides can reach.
    """
    order = sorted(range(len(shape)), key=lambda axis: -abs(strides[axis]))
    coordinate = [0] * len(shape)

    def search(position: int, rest: int) -> bool:
        if position == len(order):
            return rest == 0
        axis = order[position]
        n, stride = shape[axis], strides[axis]
        if n == 1:
            return search(position + 1, rest)
        if stride == 0:
            return False
        inner = order[position + 1 :]
        low = sum(min(0, (shape[a] - 1) * strides[a]) for a in inner)
        high = sum(max(0, (shape[a] - 1) * strides[a]) for a in inner)
        # rest - step * stride must lie in [low, high]
        ends = sorted(((rest - high) / stride, (rest - low) / stride))
        first, last = max(0, int(np.ceil(ends[0]))), min(n - 1, int(np.floor(ends[1])))
        for step in range(first, last + 1):
            if search(position + 1, rest - step * stride):
                coordinate[axis] = step
                return True
        return False

    return tuple(coordinate) if search(0, offset) else None


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a grid of ``shape`` whose ranks count up row by row: (2, 3) -> (3, 1).

    An axis of one rank has stride 1, as in ``compress``.
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step if n > 1 else 1)
        step *= n
    return tuple(reversed(strides))


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinate of the ``index``-th rank of a grid, counted row by row."""
    coordinate = []
    for n in reversed(shape):
        coordinate.append(index % n)
        index //= n
    return tuple(reversed(coordinate))


def ranks_text(ranks: Any) -> str:
    """Return ``ranks`` as text of at most 60 characters, for an error message."""
    text = repr(ranks.tolist() if isinstance(ranks, np.ndarray) else ranks)
    return text if len(text) <= 60 else "".join(itertools.islice(text, 57)) + "..."
