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


def _get_state(get: Callable[..., Tensor], of: Generator) -> Tensor:
    """Implement ``Generator.get_state``: torch's state and the count of global random ops."""
    return generator.with_count(get(of), generator.count(of))


def _set_state(set_: Callable[..., Generator], of: Generator, state: Tensor) -> Generator:
    """Implement ``Generator.set_state``, which also restores the count of global random ops."""
    done = set_(of, state)
    generator.set_count(of, generator.count_in(state))
    return done


def _manual_seed(seed: Callable[..., Generator], of: Generator, value: int) -> Generator:
    done = seed(of, value)
    generator.set_count(of, 0)
    return done


def _seed(seed: Callable[..., int], of: Generator) -> int:
    done = seed(of)
    generator.set_count(of, 0)
    return done


def _clone_state(clone: Callable[..., Generator], of: Generator) -> Generator:
    made = clone(of)
    generator.set_count(made, generator.count(of))
    return made
