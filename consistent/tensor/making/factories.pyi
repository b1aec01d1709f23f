"""The types of factories.py, which may not import the class whose objects it makes."""

from typing import Any

import torch

from ...spec import Placement, SbpLike
from ..global_tensor import GlobalTensor

def zeros(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def ones(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def empty(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def full(
    size: Any,
    fill_value: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    **options: Any,
) -> GlobalTensor: ...
def eye(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def arange(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def linspace(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def logspace(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def rand(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def randn(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def normal(
    mean: float,
    std: float,
    size: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    **options: Any,
) -> GlobalTensor: ...
def randint(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def randperm(
    n: int, *, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor: ...
def tensor(
    data: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    check: bool = False,
) -> GlobalTensor: ...
