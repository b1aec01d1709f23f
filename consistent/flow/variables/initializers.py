"""Initial values of variables. An initializer fills a tensor, the same way under any SBP."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import init

Initializer = Callable[[torch.Tensor], object]


def truncated_normal(stddev: float = 1.0, mean: float = 0.0) -> Initializer:
    """Normal, drawn again until within two deviations of the mean."""
    low, high = mean - 2 * stddev, mean + 2 * stddev
    return partial(init.trunc_normal_, mean=mean, std=stddev, a=low, b=high)


def random_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal."""
    return partial(init.normal_, mean=mean, std=stddev)


def random_uniform_initializer(minval: float = 0.0, maxval: float = 1.0) -> Initializer:
    """Uniform."""
    return partial(init.uniform_, a=minval, b=maxval)


def constant_initializer(value: float = 0.0) -> Initializer:
    """One value."""
    return partial(init.constant_, val=value)


def zeros_initializer() -> Initializer:
    """Zeros."""
    return init.zeros_


def ones_initializer() -> Initializer:
    """Ones."""
    return init.ones_


def default_initializer(x: torch.Tensor) -> None:
    """Initialise as torch does the weights of its linear and convolution layers; zeros for a
    vector."""
    if x.ndim < 2:
        init.zeros_(x)
    else:
        init.kaiming_uniform_(x, a=math.sqrt(5))
