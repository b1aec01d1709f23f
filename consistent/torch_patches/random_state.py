"""Changes for torch's random states, which then include the count of global random ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ..forms.random import generator
from .redirect import redirect


def install() -> None:
    """Redirect the methods of ``torch.Generator`` that seed, save and restore its state.

    All of torch's functions call them, such as ``manual_seed``, ``get_rng_state``, ``fork_rng`` and
    checkpointing.
    """
    redirect(torch.Generator.get_state, _get_state, "always")
    redirect(torch.Generator.set_state, _set_state, "always")
    redirect(torch.Generator.manual_seed, _manual_seed, "always")
    redirect(torch.Generator.seed, _seed, "always")
    redirect(torch.Generator.clone_state, _clone_state, "always")


def _get_state(get: Callable[..., Tensor], rng: Generator) -> Tensor:
    """Implement ``Generator.get_state``: torch's state and the count of global random ops."""
    return generator.store_draw_count(get(rng), generator.draw_count(rng))


def _set_state(set_: Callable[..., Generator], rng: Generator, state: Tensor) -> Generator:
    """Implement ``Generator.set_state``, which also restores the count of global random ops."""
    result = set_(rng, state)
    generator.set_draw_count(rng, generator.stored_draw_count(state))
    return result


def _manual_seed(seed: Callable[..., Generator], rng: Generator, value: int) -> Generator:
    result = seed(rng, value)
    generator.set_draw_count(rng, 0)
    return result


def _seed(seed: Callable[..., int], rng: Generator) -> int:
    result = seed(rng)
    generator.set_draw_count(rng, 0)
    return result


def _clone_state(clone: Callable[..., Generator], rng: Generator) -> Generator:
    copy = clone(rng)
    generator.set_draw_count(copy, generator.draw_count(rng))
    return copy
