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
from ..compiled.reached import Reached, find
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
    reached, made = find(func, given), _StandIns()
    states = [(optimizer, optimizer.state) for optimizer in reached.optimizers]
    kept: list[tuple[Source, torch.Tensor]] = []
    try:
        for place in _places(reached):
            x = place.read()
            with suppress(AttributeError, TypeError):  # the place may be fixed, as of a property
                place.write(made.of(x))
                kept.append((place, x))
        for optimizer, state in states:
            optimizer.state = made.of_state(state)
        yield made.leaves
    finally:
        for place, x in reversed(kept):
            place.write(x)
        for optimizer, state in states:
            optimizer.state = state


def _places(reached: Reached) -> list[Source]:
    """Return where each reached tensor is kept, such as a module's attribute.

    Gradients are left out, and places that cannot be written to, such as tuples. Of a tensor that
    is kept in several places, ``reached.sources`` has the first place, and ``reached.guards`` the
    other places.
    """
    others = [Source(g.store, g.key, g.path) for g in reached.guards if g.value is not ABSENT]
    found = [
        place
        for place in (*reached.sources, *others)
        if not isinstance(place.store, torch.Tensor | tuple)
    ]
    return [place for place in found if isinstance(place.read(), torch.Tensor)]


class _StandIns:
    """The replacements of tensors, one for each tensor; they are made when first asked for.

    ``leaves`` has those that are global leaves of autograd.
    """

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self._made: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []

    def of(self, x: torch.Tensor) -> Any:
        """Return the tensor that replaces ``x``, with a replaced gradient if ``x`` has one."""
        if id(x) not in self._made:
            plain = not is_global(x)
            new = x.detach().clone().requires_grad_(x.requires_grad) if plain else stand_in(x)
            self._made[id(x)] = new
            self._alive.append(x)  # so that its id stays its own
            if not plain:
                # What the library keeps of a parameter: the layouts of its gradient and its step.
                vars(new).update({key: v for key, v in vars(x).items() if key not in vars(new)})
            if x.requires_grad and x.is_leaf:
                if not plain:
                    watch_leaf(new)
                    self.leaves.append(new)
                new.grad = None if x.grad is None else self.of(x.grad)
        return self._made[id(x)]

    def of_state(self, state: Any) -> Any:
        """Return an optimizer's state with the replacement of each parameter as its key.

        The dict of each parameter is copied, so that a step does not change the original.
        """
        new: Any = defaultdict(dict)
        for param, values in state.items():
            tensors = isinstance(param, torch.Tensor)
            new[self.of(param) if tensors else param] = (
                dict(values) if isinstance(values, dict) else values
            )
        return new
