"""Tie parameters that several stages use, such as an embedding that is also the output layer.

The parameter is on the first of these stages. Each other stage computes with a copy of its own. The
copy gets the parameter's values when a batch begins, and its gradient is added to the parameter's
when the batch ends.

```
                     between batches     begin                end
embed on stage 0     weight on P0        weight --values-->   its gradient + that of the copy
head  on stage 3     weight on P0        copy on P3           <--gradient--
```

Code that iterates over the model, such as an optimizer, a gradient norm or a state_dict, thus finds
the parameter once, and no copies. A batch sends one weight in each direction, however many
micro-batches it has.
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
    """Copy that stands for a tied parameter in the modules of one stage while a batch runs.

    Args:
        first_place: (module, key) of the parameter in the first stage that uses it.
        places: (module, key) of each use of the parameter in this stage.
        leaf: the copy, a leaf in the layout of this stage's plan.
        original: the parameter while a batch runs, otherwise None.
    """

    first_place: Place
    places: list[Place] = field(default_factory=list)
    leaf: Any = None
    original: Any = None

    def set_parameter(self, value: Any) -> None:
        """Make ``value`` the parameter of the stage's modules in each of ``places``."""
        for owner, key in self.places:
            owner._parameters[key] = value
            if isinstance(owner, torch.nn.RNNBase):  # its forward reads weights from a list
                names = owner._flat_weights_names
                owner._flat_weights = [getattr(owner, name, None) for name in names]

    def insert(self) -> None:
        """Put the copy into the stage's modules, when a batch begins.

        It gets the dtype, shape and ``requires_grad`` that the parameter has then, and no values.

        Raises:
            RuntimeError: the modules no longer hold one global parameter in these places.
        """
        params = [owner._parameters[key] for owner, key in self.places]
        if not is_global(params[0]) or any(p is not params[0] for p in params):
            owner, key = self.places[0]
            raise RuntimeError(
                f"pipeline: {key!r} of {type(owner).__name__} is another parameter than the one "
                "that was tied to an earlier stage when the model was cut, and its stage computes "
                "with a copy of that one.\n  Write the values into it under torch.no_grad(), or "
                "replace the parameter before consistent.nn.pipeline."
            )
        self.original = params[0]
        # The parameter may have got another dtype or shape since the last batch, as by half().
        if (self.leaf.shape, self.leaf.dtype) != (self.original.shape, self.original.dtype):
            layout = {"placement": self.leaf.placement, "sbp": self.leaf.sbp}
            self.leaf.data = empty(self.original.shape, dtype=self.original.dtype, **layout)
        self.leaf.grad = None
        self.leaf.requires_grad_(self.original.requires_grad)
        self.set_parameter(self.leaf)

    def remove(self) -> None:
        """Put the parameter back into the stage's modules, and drop the copy's gradient."""
        if self.original is not None:
            self.set_parameter(self.original)
        self.original = self.leaf.grad = None

    def copy_value(self) -> None:
        """Copy the parameter's values into ``leaf``; a collective of the two stages' ranks."""
        with torch.no_grad():
            self.leaf.copy_(self.original.to_global(self.leaf.placement, self.leaf.sbp))

    def add_gradient(self) -> None:
        """Add the gradient of ``leaf`` to that of the parameter: a collective if ``leaf`` has one.

        Hooks of the parameter see the gradient of ``leaf``.
        """
        if self.leaf.grad is None:
            return
        param, old_grad = self.original, self.original.grad
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            torch.autograd.backward([param], [self.leaf.grad.to_global(param.placement, param.sbp)])
            return
        # In the layout that gradients have after backward. Without hooks to call, adding directly
        # is cheaper: another backward would sum the gradient over the ranks once more.
        sbp = settled_spec(param).sbp if old_grad is None else old_grad.sbp
        grad = self.leaf.grad.to_global(param.placement, sbp)
        if old_grad is None:
            set_raw_grad(param, grad)
        else:
            with torch.no_grad():
                old_grad.add_(grad)


class TiedParameters:
    """Parameters that several stages use, with the copy that each stage but the first has of them.

    Every rank must call all methods, in the same order.
    """

    def __init__(self, copies: Sequence[_Copy] = ()) -> None:
        self._copies = list(copies)

    def restore_parameters(self) -> None:
        """Put tied parameters back into all modules, and keep the stages' own leaves as copies.

        ``untie_parameters`` made the leaves. Call this method when each stage has laid out its
        parameters as global tensors, the leaves among them.
        """
        for copy in self._copies:
            owner, key = copy.places[0]
            copy.leaf = owner._parameters[key]
            owner, key = copy.first_place
            copy.set_parameter(owner._parameters[key])

    @contextmanager
    def copies_in_modules(self) -> Iterator[None]:
        """Run the block, a batch, with the stages' copies in their modules."""
        try:
            for copy in self._copies:
                copy.insert()
            yield
        finally:
            for copy in self._copies:
                copy.remove()

    def copy_values(self) -> None:
        """Copy the values of the parameters into the copies, at the beginning of a batch."""
        for copy in self._copies:
            copy.copy_value()

    def add_gradients(self) -> None:
        """Add the gradients of the copies to those of the parameters, at the end of a batch."""
        for copy in self._copies:
            copy.add_gradient()


def untie_parameters(stages: Sequence[Sequence[torch.nn.Module]]) -> TiedParameters:
    """Give each stage its own leaf for a parameter that an earlier stage holds, too.

    ``stages`` has the modules of each stage. The leaf shares the parameter's memory until the stage
    lays it out as a global tensor. ``TiedParameters.restore_parameters`` undoes it.
    """
    home: dict[int, tuple[int, Place]] = {}  # id of a parameter -> its first stage and place
    copies: dict[tuple[int, int], _Copy] = {}
    for stage, modules in enumerate(stages):
        for owner in (module for top in modules for module in top.modules()):
            for key, p in owner._parameters.items():
                if p is None:
                    continue
                first_stage, place = home.setdefault(id(p), (stage, (owner, key)))
                if first_stage != stage:
                    stage_copy = copies.setdefault((id(p), stage), _Copy(place))
                    stage_copy.places.append((owner, key))
    for copy in copies.values():
        owner, key = copy.first_place
        p: Any = owner._parameters[key]
        copy.set_parameter(torch.nn.Parameter(p.detach(), p.requires_grad))
    return TiedParameters(list(copies.values()))
