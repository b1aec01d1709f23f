"""Initializers of variables: functions that fill a tensor, with the same values in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import init

Initializer = Callable[[torch.Tensor], object]


def truncated_normal(stddev: float = 1.0, mean: float = 0.0) -> Initializer:
    """Return an initializer that draws normal values within two standard deviations of the mean."""
    low, high = mean - 2 * stddev, mean + 2 * stddev
    return partial(init.trunc_normal_, mean=mean, std=stddev, a=low, b=high)


def random_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Return an initializer that draws values of a normal distribution."""
    return partial(init.normal_, mean=mean, std=stddev)


def random_uniform_initializer(minval: float = 0.0, maxval: float = 1.0) -> Initializer:
    """Return an initializer that draws values uniformly from ``minval`` to ``maxval``."""
    return partial(init.uniform_, a=minval, b=maxval)


def constant_initializer(value: float = 0.0) -> Initializer:
    """Return an initializer that sets every element to ``value``."""
    return partial(init.constant_, val=value)


def zeros_initializer() -> Initializer:
    """Return an initializer that sets every element to 0."""
    return init.zeros_


def ones_initializer() -> Initializer:
    """Return an initializer that sets every element to 1."""
    return init.ones_


def default_initializer(x: torch.Tensor) -> None:
    """Fill ``x``, a variable for which no initializer was given.

    A vector gets zeros, and other tensors the values of torch's linear and convolution layers
    (``kaiming_uniform_``).
    """
    if x.ndim < 2:
        init.zeros_(x)
    else:
        init.kaiming_uniform_(x, a=math.sqrt(5))
