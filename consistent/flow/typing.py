"""typing: what a job takes (placeholders) and gives (results).

``Numpy`` stands for a whole batch, ``ListNumpy`` for a list with one part per device. As
annotations they say which of the two a job returns; the values it returns are of these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .scope import ViewName


@dataclass(frozen=True)
class Placeholder:
    """An argument of a job: shape and dtype, of the whole batch or of each device's part."""

    view: ViewName
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    batch_axis: int | None = 0


class Numpy(np.ndarray):
    """A whole result. It is a numpy array; the methods are the older way to ask for one."""

    @staticmethod
    def Placeholder(  # noqa: N802  (the documents' name)
        shape: Sequence[int], dtype: torch.dtype = torch.float32, batch_axis: int | None = 0
    ) -> Placeholder:
        """A whole batch, split over the devices along ``batch_axis`` (None: whole on each)."""
        return Placeholder("consistent", tuple(shape), dtype, batch_axis)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # What is computed from a result is plain numpy.
        return array.view(np.ndarray)[()] if array.ndim == 0 else array.view(np.ndarray)

    def get(self) -> Numpy:
        """The result itself: a call has ended when it returns."""
        return self

    def numpy(self) -> np.ndarray:
        """The plain array."""
        return self.view(np.ndarray)

    ndarray = numpy


class ListNumpy(list):
    """A result with one array per device."""

    @staticmethod
    def Placeholder(  # noqa: N802
        shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Placeholder:
        """A list with one part of this shape for each device."""
        return Placeholder("mirrored", tuple(shape), dtype)

    def get(self) -> ListNumpy:
        """The result itself."""
        return self

    def numpy_list(self) -> list[np.ndarray]:
        """The plain list."""
        return list(self)

    ndarray_list = numpy_list


class Several(tuple):
    """The results of a job that returns more than one."""

    def get(self) -> Several:
        """The results themselves."""
        return self


def FixedTensorDef(  # noqa: N802
    shape: Sequence[int], dtype: torch.dtype = torch.float32, name: str | None = None
) -> Placeholder:
    """``Numpy.Placeholder``, written as an argument's default."""
    return Numpy.Placeholder(shape, dtype)


def MirroredTensorDef(  # noqa: N802
    shape: Sequence[int], dtype: torch.dtype = torch.float32, name: str | None = None
) -> Placeholder:
    """``ListNumpy.Placeholder``, written as an argument's default."""
    return ListNumpy.Placeholder(shape, dtype)
