"""Parameters that several stages use: each is one parameter, on the first of these stages. The
others compute with a copy, which gets its values when a batch begins, and whose gradient is added
to that of the parameter when it ends.

```
                     between batches     begin                end
embed on stage 0     weight on P0        weight --values-->   its gradient + that of the copy
head  on stage 3     weight on P0        copy on P3           <--gradient--
```

So what walks over the model, such as an optimizer, a norm or a state_dict, finds the parameter once
and needs no copy. Each way sends one weight, however many micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dispatch.plans.gradients import set_raw_grad, settled_spec
from ..dispatch.plans.shards import is_global
from ..tensor.making.factories import empty

Place = tuple[torch.nn.Module, str]


@dataclass
class _Copy:
    """What stands for a parameter in the modules of a stage while a batch runs.

    Args:
        home: where the first stage that uses the parameter has it.
        places: where this stage has it.
        leaf: a leaf of the stage's own, laid out as its plan says.
        of: the parameter, while a batch runs.
    """

    home: Place
    places: list[Place] = field(default_factory=list)
    leaf: Any = None
    of: Any = None

    def put(self, value: Any) -> None:
        for owner, key in self.places:
            owner._parameters[key] = value
            if isinstance(owner, torch.nn.RNNBase):  # it reads its weights from a list
                names = owner._flat_weights_names
                owner._flat_weights = [getattr(owner, name, None) for name in names]

    def show(self) -> None:
        """Put the copy in its places.

        Raises:
            RuntimeError: they do not hold one global parameter any more.
        """
        held = [owner._parameters[key] for owner, key in self.places]
        if not is_global(held[0]) or any(p is not held[0] for p in held):
            owner, key = self.places[0]
            raise RuntimeError(
                f"pipeline: {key!r} of {type(owner).__name__} is another parameter than the one "
                "that was tied to an earlier stage when the model was cut, and its stage computes "
                "with a copy of that one.\n  Write the values into it under torch.no_grad(), or "
                "replace the parameter before consistent.nn.pipeline."
            )
        self.of = held[0]
        if (self.leaf.shape, self.leaf.dtype) != (self.of.shape, self.of.dtype):
            where = {"placement": self.leaf.placement, "sbp": self.leaf.sbp}
            self.leaf.data = empty(self.of.shape, dtype=self.of.dtype, **where)
        self.leaf.grad = None
        self.leaf.requires_grad_(self.of.requires_grad)
        self.put(self.leaf)

    def hide(self) -> None:
        """Put the parameter back."""
        if self.of is not None:
            self.put(self.of)
        self.of = self.leaf.grad = None

    def take_values(self) -> None:
        """Become what the parameter is."""
        with torch.no_grad():
            self.leaf.copy_(self.of.to_global(self.leaf.placement, self.leaf.sbp))

    def give_gradient(self) -> None:
        """Add the copy's gradient to that of the parameter."""
        if self.leaf.grad is None:
            return
        p, before = self.of, self.of.grad
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            torch.autograd.backward([p], [self.leaf.grad.to_global(p.placement, p.sbp)])
            return
        # As they lie after backward; what backward itself does would sum them once more.
        sbp = settled_spec(p).sbp if before is None else before.sbp
        new = self.leaf.grad.to_global(p.placement, sbp)
        if before is None:
            set_raw_grad(p, new)
        else:
            with torch.no_grad():
                before.add_(new)


class Tied:
    """The copies of all stages. Every rank calls all methods, in the same order."""

    def __init__(self, copies: Sequence[_Copy] = ()) -> None:
        self._copies = list(copies)

    def join(self) -> None:
        """Put the parameters where ``untie`` put leaves, which are laid out by now."""
        for copy in self._copies:
            owner, key = copy.places[0]
            copy.leaf = owner._parameters[key]
            owner, key = copy.home
            copy.put(owner._parameters[key])

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the modules of each stage hold the leaves of that stage."""
        try:
            for copy in self._copies:
                copy.show()
            yield
        finally:
            for copy in self._copies:
                copy.hide()

    def begin(self) -> None:
        """Give the copies their values."""
        for copy in self._copies:
            copy.take_values()

    def end(self) -> None:
        """Add the copies' gradients to those of the parameters."""
        for copy in self._copies:
            copy.give_gradient()


def untie(stages: Sequence[Sequence[torch.nn.Module]]) -> Tied:
    """Give every stage but the first that holds a parameter one of its own, of the same memory: it
    becomes global on the ranks of its stage."""
    home: dict[int, tuple[int, Place]] = {}  # of each parameter, with the stage
    found: dict[tuple[int, int], _Copy] = {}
    for stage, modules in enumerate(stages):
        for owner in (each for top in modules for each in top.modules()):
            for key, p in owner._parameters.items():
                if p is None:
                    continue
                first, place = home.setdefault(id(p), (stage, (owner, key)))
                if first != stage:
                    made = found.setdefault((id(p), stage), _Copy(place))
                    made.places.append((owner, key))
    for copy in found.values():
        owner, key = copy.home
        p: Any = owner._parameters[key]
        copy.put(torch.nn.Parameter(p.detach(), p.requires_grad))
    return Tied(list(found.values()))
