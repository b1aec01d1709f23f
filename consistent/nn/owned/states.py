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

from mirrored.every_rank import gather_from_ranks

from ...dispatch.plans.shards import attach, is_global, plain
from ...movement.run import run
from ...spec import Placement, TensorSpec
from ...spec.nested import map_instances, map_tensors, tensors_in
from ...tensor.storage.step_layout import OwnedState, owned_spec
from ..sharded.master_weights import numbered_params
from .owners import is_this_rank, owners_of


def move_state_to_owner(optimizer: Optimizer, param: Any, owner: Placement) -> None:
    """Move a parameter's optimizer state to the rank that owns the parameter, if it is elsewhere.

    The state is elsewhere if it was loaded, was made while the optimizer stepped in another way, or
    the job was moved. Called before each step; a collective if the state has global tensors.
    """
    state = optimizer.state.get(param)
    if isinstance(state, OwnedState) and state.owner == owner:
        return

    def whole_on_owner(x: Any) -> Tensor:
        if not is_global(x):
            return x
        local = plain(x).detach()
        arrived = run(local, x._spec, owned_spec(owner, x.shape, x.dtype))
        return arrived.clone() if arrived is local else arrived

    whole_state = map_tensors(dict(state or {}), whole_on_owner)
    optimizer.state[param] = OwnedState(whole_state if is_this_rank(owner) else {}, owner)


class _TensorMeta(NamedTuple):
    """Shape and dtype of a tensor in an owner's state, which other ranks get in its place."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def global_states(
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
    owned = {
        number: (param, state)
        for number, param in numbered_params(optimizer).items()
        if isinstance(state := optimizer.state.get(param), OwnedState)
    }
    if not owned:
        return {}
    own_descriptions = {
        number: _describe_state(state) for number, (_, state) in owned.items() if state
    }
    descriptions: dict[int, Any] = {}
    for rank_descriptions in gather_from_ranks(own_descriptions):
        descriptions.update(rank_descriptions)
    return {
        number: (param, _state_of_globals(descriptions.get(number, {}), state, as_global))
        for number, (param, state) in owned.items()
    }


def _describe_state(state: OwnedState) -> dict[str, Any]:
    """Return a parameter's state as its owner sends it to the other ranks.

    Each tensor with dims is replaced by a ``_TensorMeta``, its shape and dtype.
    """

    def describe(x: Tensor) -> Any:
        return x.detach() if x.ndim == 0 else _TensorMeta(tuple(x.shape), x.dtype)

    return map_tensors(dict(state), describe)


def _state_of_globals(
    description: dict[str, Any], state: OwnedState, as_global: Callable[[Tensor, TensorSpec], Any]
) -> dict[str, Any]:
    """Return a parameter's state with global tensors, on the placement of its one owner.

    On other ranks their shards are meta tensors.

    Args:
        description: the state as its owner described it, with a ``_TensorMeta`` in place of each
            tensor.
        state: the state on this rank, empty if another rank owns the parameter.
        as_global: (plain tensor, spec) -> global tensor.
    """
    own_tensors = [x for x in tensors_in(dict(state)) if x.ndim]
    tensors = iter(own_tensors)

    def make_global(x: _TensorMeta) -> Any:
        local = next(tensors) if own_tensors else torch.empty(x.shape, dtype=x.dtype, device="meta")
        return as_global(local, owned_spec(state.owner, x.shape, x.dtype))

    return map_instances(description, _TensorMeta, make_global)


def add_owned_state(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Put state that owner ranks hold into ``state_dict``, so that it is the same on every rank.

    A state_dict post-hook of the optimizer, and a collective. Entries that other hooks have added
    for a parameter stay.
    """
    states = global_states(optimizer, lambda x, spec: attach(x.detach(), spec))
    if not states:
        return
    state_dict["state"] = state = dict(state_dict["state"])
    for number, (param, global_state) in states.items():
        own_state = optimizer.state[param]
        hook_entries = {key: x for key, x in state.get(number, {}).items() if key not in own_state}
        state[number] = {**global_state, **hook_entries}
        if not state[number]:  # no step has stepped this parameter yet
            del state[number]


def globalize_owned_state(optimizers: Any) -> None:
    """Replace optimizer state that only its owner rank holds by global tensors on every rank.

    ``move`` needs this to bring the state to other ranks. The next step assigns owners again and
    moves the state back to them. A collective of the world if there is such state.

    Args:
        optimizers: one optimizer or several; other objects are skipped.
    """
    optimizer_list = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in optimizer_list:
        if isinstance(optimizer, Optimizer):
            for param, global_state in global_states(optimizer, attach).values():
                optimizer.state[param] = global_state
            if (owners := owners_of(optimizer)) is not None:
                owners.forget()
