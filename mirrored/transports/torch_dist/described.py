"""Makes the tags of messages describe the call, in as much detail as headers in shared memory do.

A message is matched by its tag, which has the collective, the ranks, the dtype and the bytes. Calls
may agree in all of these and still not match, such as gathers of float32[4, 6] and float32[6, 4]
along dim 1. So the methods here add what their ranks must agree on: dims, sizes, and the reduction.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...comm import Handle, Ranks, Shape
from ..base.checked import CheckedTransport


class _ThreadState(threading.local):
    call: tuple = ()


_thread = _ThreadState()


def current_call() -> tuple:
    """Return the description of this thread's current call, which its messages' tags include."""
    return _thread.call


class resume_call:
    """Context manager in which the tags of messages describe ``call``.

    It is for messages of a call that was begun before: ``call`` is what ``current_call`` returned
    then.
    """

    __slots__ = ("_call", "_before")

    def __init__(self, call: tuple) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._before, _thread.call = _thread.call, self._call

    def __exit__(self, *_: object) -> None:
        _thread.call = self._before


def describe_call(*call: object) -> resume_call:
    """Return a context manager in which the tags of messages describe ``call``.

    If this thread is inside another such block, the tags still describe the outer call.
    """
    return resume_call(_thread.call or call)


class DescribedCalls(CheckedTransport):
    """Base class of a transport whose messages' tags describe the call that sends them."""

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        with describe_call("all_reduce", tuple(x.shape)):
            return super().all_reduce_async(x, ranks, op)

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        with describe_call("broadcast", tuple(shape)):
            return super().broadcast(x, shape, dtype, device, source, ranks)

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        with describe_call("all_gather_into_tensor", agreed_layout(x.shape, dim, sizes)):
            return super().all_gather_into_tensor(x, dim, sizes, ranks)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        with describe_call("reduce_scatter", op, agreed_layout(x.shape, dim, sizes)):
            return super().reduce_scatter(x, dim, sizes, ranks, op)

    def all_to_all_single(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        ranks: Ranks,
    ) -> Tensor:
        concat_layout = agreed_layout(x.shape, concat_dim, concat_sizes)
        with describe_call(
            "all_to_all_single", split_dim % x.dim(), tuple(split_sizes), concat_layout
        ):
            return super().all_to_all_single(
                x, split_dim, split_sizes, concat_dim, concat_sizes, ranks
            )

    def peers(self, x: Tensor, ranks: Ranks) -> AbstractContextManager[list[Tensor]]:
        with describe_call("peers", tuple(x.shape)):
            return super().peers(x, ranks)


def agreed_layout(shape: Shape, dim: int, sizes: Sequence[int]) -> tuple:
    """Return what ranks must agree on in a call that cuts or joins a tensor along ``dim``.

    Their ``shape`` may differ along ``dim``, and the result is the same on all:
    ``agreed_layout((4, 6), 1, (6, 2)) -> (1, (6, 2), (4,), ())``.
    """
    # Without the size along `dim`: it differs between ranks, which know all of `sizes`.
    dim %= len(shape)
    return dim, tuple(sizes), tuple(shape[:dim]), tuple(shape[dim + 1 :])
