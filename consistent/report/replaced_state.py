"""Replace the tensors that last between steps while ``explain`` runs a step without values.

A step reads and writes parameters, their gradients and the state of optimizers. While ``explain``
runs it, tensors without values replace global tensors, copies replace plain ones, and what the step
writes is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..autograd.leaves import watch_leaf
from ..compiled.reached import ReachableState, find_reachable_state
from ..compiled.sources import ABSENT, Source
from ..dispatch.plans.shards import is_global
from ..graph.stand_ins import stand_in


@contextmanager
def replaced_state(func: Callable[..., Any], given: Any) -> Iterator[list[Any]]:
    """Replace the tensors that ``func`` reaches, except its arguments, in the ``with`` block.

    ``explain`` uses it, so that a training step leaves parameters and states unchanged. Global
    tensors are replaced by tensors without values, and plain ones by copies. The context manager
    yields the list of replacements that are leaves of autograd.

    Args:
        func: the function; modules and optimizers are found as for a compiled step.
        given: its arguments, whose modules and optimizers count as reached.
    """
    reached, replacements = find_reachable_state(func, given), _Replacements()
    states = [(optimizer, optimizer.state) for optimizer in reached.optimizers]
    originals: list[tuple[Source, torch.Tensor]] = []
    try:
        for place in _places(reached):
            x = place.read()
            with suppress(AttributeError, TypeError):  # the place may be fixed, as of a property
                place.write(replacements.replacement(x))
                originals.append((place, x))
        for optimizer, state in states:
            optimizer.state = replacements.state_replacement(state)
        yield replacements.leaves
    finally:
        for place, x in reversed(originals):
            place.write(x)
        for optimizer, state in states:
            optimizer.state = state


def _places(reached: ReachableState) -> list[Source]:
    """Return where each reached tensor is kept, such as a module's attribute.

    Gradients are left out, and places that cannot be written to, such as tuples. Of a tensor that
    is kept in several places, ``reached.sources`` has the first place, and ``reached.guards`` the
    other places.
    """
    other_places = [Source(g.store, g.key, g.path) for g in reached.guards if g.value is not ABSENT]
    places = [
        place
        for place in (*reached.sources, *other_places)
        if not isinstance(place.store, torch.Tensor | tuple)
    ]
    return [place for place in places if isinstance(place.read(), torch.Tensor)]


class _Replacements:
    """The replacements of tensors, one for each tensor; they are made when first asked for.

    ``leaves`` has those that are global leaves of autograd.
    """

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self._by_id: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []

    def replacement(self, x: torch.Tensor) -> Any:
        """Return the tensor that replaces ``x``, with a replaced gradient if ``x`` has one."""
        if id(x) not in self._by_id:
            is_plain = not is_global(x)
            substitute = (
                x.detach().clone().requires_grad_(x.requires_grad) if is_plain else stand_in(x)
            )
            self._by_id[id(x)] = substitute
            self._alive.append(x)  # so that its id stays its own
            if not is_plain:
                # What the library keeps of a parameter: the layouts of its gradient and its step.
                vars(substitute).update(
                    {key: v for key, v in vars(x).items() if key not in vars(substitute)}
                )
            if x.requires_grad and x.is_leaf:
                if not is_plain:
                    watch_leaf(substitute)
                    self.leaves.append(substitute)
                substitute.grad = None if x.grad is None else self.replacement(x.grad)
        return self._by_id[id(x)]

    def state_replacement(self, state: Any) -> Any:
        """Return an optimizer's state with the replacement of each parameter as its key.

        The dict of each parameter is copied, so that a step does not change the original.
        """
        new: Any = defaultdict(dict)
        for param, values in state.items():
            is_tensor = isinstance(param, torch.Tensor)
            new[self.replacement(param) if is_tensor else param] = (
                dict(values) if isinstance(values, dict) else values
            )
        return new
