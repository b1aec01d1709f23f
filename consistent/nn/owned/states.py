"""Store the optimizer state of whole matrices: plain tensors on the owner, nothing elsewhere.

```
             rank 0 owns w                        rank 1
between      state[w] = {"buf": plain, whole}     state[w] = {}
state_dict   state[w] = {"buf": B on [0]}         state[w] = {"buf": B on [0], here on meta}
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirrored.every_rank import gathered

from ...dispatch.plans.shards import attach, is_global, plain
from ...movement.run import run
from ...spec import Placement, TensorSpec
from ...spec.nested import map_each, map_tensors, tensors_in
from ...tensor.storage.step_layout import OwnedState, owned_spec
from ..sharded.master_weights import ordered
from .owners import is_mine, owners_of


def settle(optimizer: Optimizer, param: Any, owner: Placement) -> None:
    """Move a parameter's optimizer state to the rank that owns the parameter, if it is elsewhere.

    The state is elsewhere if it was loaded, was made while the optimizer stepped in another way, or
    the job was moved. Called before each step; a collective if the state has global tensors.
    """
    state = optimizer.state.get(param)
    if isinstance(state, OwnedState) and state.owner == owner:
        return

    def whole(x: Any) -> Tensor:
        if not is_global(x):
            return x
        local = plain(x).detach()
        arrived = run(local, x._spec, owned_spec(owner, x.shape, x.dtype))
        return arrived.clone() if arrived is local else arrived

    made = map_tensors(dict(state or {}), whole)
    optimizer.state[param] = OwnedState(made if is_mine(owner) else {}, owner)


class _Told(NamedTuple):
    """Shape and dtype of a tensor in an owner's state, which other ranks get in its place."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def told_states(
    optimizer: Optimizer, as_global: Callable[[Tensor, TensorSpec], Any]
) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Return on every rank the optimizer state that owner ranks hold, made of global tensors.

    Each tensor is on the placement of its one owner; other ranks get a meta tensor. Values that are
    no tensors are taken from the owner, and so are tensors without dims, which stay plain. A
    collective of the world if the optimizer has stepped a parameter whole.

    Args:
        optimizer: the optimizer.
        as_global: (plain tensor, spec) -> global tensor.

    Returns:
        number of a parameter -> (the parameter, its state).
    """
    found = {
        number: (param, state)
        for number, param in ordered(optimizer).items()
        if isinstance(state := optimizer.state.get(param), OwnedState)
    }
    if not found:
        return {}
    mine = {number: _described(state) for number, (_, state) in found.items() if state}
    told: dict[int, Any] = {}
    for each in gathered(mine):
        told.update(each)
    return {
        number: (param, _laid(told.get(number, {}), state, as_global))
        for number, (param, state) in found.items()
    }


def _described(state: OwnedState) -> dict[str, Any]:
    """Return a parameter's state as its owner sends it to the other ranks.

    Each tensor with dims is replaced by a ``_Told``, its shape and dtype.
    """

    def describe(x: Tensor) -> Any:
        return x.detach() if x.ndim == 0 else _Told(tuple(x.shape), x.dtype)

    return map_tensors(dict(state), describe)


def _laid(
    told: dict[str, Any], state: OwnedState, as_global: Callable[[Tensor, TensorSpec], Any]
) -> dict[str, Any]:
    """Return a parameter's state with global tensors, on the placement of its one owner.

    On other ranks their shards are meta tensors.

    Args:
        told: the state as its owner described it, with a ``_Told`` in place of each tensor.
        state: the state on this rank, empty if another rank owns the parameter.
        as_global: (plain tensor, spec) -> global tensor.
    """
    own = [x for x in tensors_in(dict(state)) if x.ndim]
    tensors = iter(own)

    def make(x: _Told) -> Any:
        local = next(tensors) if own else torch.empty(x.shape, dtype=x.dtype, device="meta")
        return as_global(local, owned_spec(state.owner, x.shape, x.dtype))

    return map_each(told, _Told, make)


def tell(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Put state that owner ranks hold into ``state_dict``, so that it is the same on every rank.

    A state_dict post-hook of the optimizer, and a collective. Entries that other hooks have added
    for a parameter stay.
    """
    states = told_states(optimizer, lambda x, spec: attach(x.detach(), spec))
    if not states:
        return
    state_dict["state"] = state = dict(state_dict["state"])
    for number, (param, told) in states.items():
        own = optimizer.state[param]
        entered = {key: x for key, x in state.get(number, {}).items() if key not in own}
        state[number] = {**told, **entered}
        if not state[number]:  # no step has stepped this parameter yet
            del state[number]


def show_owned(optimizers: Any) -> None:
    """Replace optimizer state that only its owner rank holds by global tensors on every rank.

    ``move`` needs this to bring the state to other ranks. The next step assigns owners again and
    moves the state back to them. A collective of the world if there is such state.

    Args:
        optimizers: one optimizer or several; other objects are skipped.
    """
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in several:
        if isinstance(optimizer, Optimizer):
            for param, told in told_states(optimizer, attach).values():
                optimizer.state[param] = told
            if (owners := owners_of(optimizer)) is not None:
                owners.forget()
