"""``flow.typing``: declarations of a job's arguments (placeholders), and classes of its results.

``Numpy`` stands for a whole batch, ``ListNumpy`` for a list with one part per device. As a return
annotation they say which of the two a job returns; its results are objects of these classes.
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
    """Declaration of an argument of a job: its shape and dtype.

    In the view "consistent", shape and dtype are those of the whole batch, which is split over the
    devices along ``batch_axis`` (None: replicated). In the view "mirrored" they are those of each
    device's part of the batch.
    """

    view: ViewName
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    batch_axis: int | None = 0


class Numpy(np.ndarray):
    """Result of a job as one numpy array; as a return annotation, a whole batch.

    ``get()`` and ``numpy()`` exist for programs that call them to wait for an asynchronous result.
    """

    @staticmethod
    def Placeholder(  # noqa: N802  (the documents' name)
        shape: Sequence[int], dtype: torch.dtype = torch.float32, batch_axis: int | None = 0
    ) -> Placeholder:
        """Return the placeholder of a whole batch, split over the devices along ``batch_axis``.

        If ``batch_axis`` is None, every device has the whole batch.
        """
        return Placeholder("consistent", tuple(shape), dtype, batch_axis)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # What is computed from a result is plain numpy.
        return array.view(np.ndarray)[()] if array.ndim == 0 else array.view(np.ndarray)

    def get(self) -> Numpy:
        """Return the array itself: a job's results are complete when its call returns."""
        return self

    def numpy(self) -> np.ndarray:
        """Return the result as a plain ``np.ndarray``."""
        return self.view(np.ndarray)

    ndarray = numpy


class ListNumpy(list):
    """Result of a job as a list with one numpy array per device; also a return annotation."""

    @staticmethod
    def Placeholder(  # noqa: N802
        shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Placeholder:
        """Return the placeholder of a list with one part of this shape for each device."""
        return Placeholder("mirrored", tuple(shape), dtype)

    def get(self) -> ListNumpy:
        """Return the list itself: a job's results are complete when its call returns."""
        return self

    def numpy_list(self) -> list[np.ndarray]:
        """Return the result as a plain list."""
        return list(self)

    ndarray_list = numpy_list


class Several(tuple):
    """Tuple of the results of a job that returns several."""

    def get(self) -> Several:
        """Return the tuple itself: a job's results are complete when its call returns."""
        return self


def FixedTensorDef(  # noqa: N802
    shape: Sequence[int], dtype: torch.dtype = torch.float32, name: str | None = None
) -> Placeholder:
    """Return ``Numpy.Placeholder(shape, dtype)``, as the default value of a job's argument.

    ``name`` is ignored.
    """
    return Numpy.Placeholder(shape, dtype)


def MirroredTensorDef(  # noqa: N802
    shape: Sequence[int], dtype: torch.dtype = torch.float32, name: str | None = None
) -> Placeholder:
    """Return ``ListNumpy.Placeholder(shape, dtype)``, as the default value of a job's argument.

    ``name`` is ignored.
    """
    return ListNumpy.Placeholder(shape, dtype)
