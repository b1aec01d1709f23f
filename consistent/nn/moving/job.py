"""Collect the tensors of a training job, each with its specs before and after a move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ...dispatch.plans.gradients import raw_grad
from ...dispatch.plans.shards import is_global
from ...spec import B, NdSbp, Placement, SbpLike, TensorSpec
from ...spec.nested import tensors_in
from ..plan import Layouts, Plan
from ..sharded.master_weights import masters_of
from ..slots import Slot, plain_attributes, plain_slots


@dataclass(eq=False)
class Moved:
    """One global tensor of a job that moves.

    Attributes:
        name: its name, which is the same on all ranks.
        tensor: the global tensor.
        src, dst: its spec before and after the move.
    """

    name: str
    tensor: Any
    src: TensorSpec
    dst: TensorSpec

    def __str__(self) -> str:
        return f"{self.name}: {self.src} -> {self.dst}"


@dataclass(eq=False)
class JobToMove:
    """Training job: a model, its optimizers, their tensors, and the target of the move.

    Attributes:
        old, placement: the placement before and after the move.
        plan, inputs: the plan and the layouts of inputs after the move.
        params: the global parameters, each once.
        buffers: the global buffers, each once.
        grads: position of a parameter in ``params`` -> its gradient.
        state: the optimizers' global tensors, copies of master weights among them.
        plain: name -> plain tensor, of which every rank holds a whole one.
    """

    model: torch.nn.Module
    optimizers: Sequence[Optimizer]
    old: Placement
    placement: Placement
    plan: Plan
    inputs: SbpLike | Mapping[str, SbpLike] | None
    params: list[Moved] = field(default_factory=list)
    buffers: list[Moved] = field(default_factory=list)
    grads: dict[int, Moved] = field(default_factory=dict)
    state: list[Moved] = field(default_factory=list)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Moved]:
        """Return all tensors that are moved, in an order that is the same on every rank."""
        return [*self.params, *self.buffers, *self.grads.values(), *self.state]

    def enter(self, slots: Sequence[Sequence[Slot]]) -> None:
        """Add the tensors of the model and of its optimizers to this job.

        Args:
            slots: the places of the global parameters and buffers, one list for each tensor.
        """
        layouts_of: dict[int, Layouts] = {}
        plan = self.plan.on(self.placement)
        for places in slots:
            x: Any = places[0].value
            layouts = plan.layouts(places[0].name)
            assert layouts is not None
            if isinstance(x, torch.nn.Parameter):
                self._enter_parameter(places[0].name, x, layouts)
                layouts_of[id(x)] = layouts
            else:
                self.buffers.append(self._moved(places[0].name, x, layouts.sbp))
        for i, optimizer in enumerate(self.optimizers):
            self._enter_optimizer(f"optimizer {i}" if i else "optimizer", optimizer, layouts_of)
        for places in [*plain_slots(self.model), *plain_attributes(self.model)]:
            self._enter_plain(places[0].name, places[0].value)

    def _moved(self, name: str, x: Any, sbp: NdSbp) -> Moved:
        """Return ``x`` as a tensor to move, with the layout ``sbp`` on the new placement."""
        return Moved(name, x, x._spec, TensorSpec.of(self.placement, sbp, x.shape, x.dtype))

    def _enter_parameter(self, name: str, x: Any, layouts: Layouts) -> None:
        """Add a parameter and its gradient, if it has one."""
        grad = raw_grad(x)
        if grad is not None:
            self.grads[len(self.params)] = self._moved(f"{name}.grad", grad, layouts.grad)
        self.params.append(self._moved(name, x, layouts.sbp))

    def _enter_optimizer(
        self, what: str, optimizer: Optimizer, layouts_of: dict[int, Layouts]
    ) -> None:
        """Add an optimizer's tensors.

        State of a parameter's shape gets the layout in which the parameter is stepped, and all
        other state becomes B.

        Args:
            what: a text for the names of these tensors, such as ``optimizer 1``.
            optimizer: the optimizer.
            layouts_of: id of a parameter -> its layouts in the new plan.
        """
        names = {id(each.tensor): each.name for each in self.params}
        masters, known = masters_of(optimizer), {id(each.tensor) for each in self.tensors()}
        whole = (B,) * self.placement.ndim
        for p in params_of(optimizer):
            name = f"{what}[{names.get(id(p), 'a plain parameter')}]"
            found = [*_named(name, optimizer.state.get(p, {}))]
            if masters is not None and p in masters.copies:
                found.append((f"{name}.master", masters.copies[p][0]))
            step = layouts_of[id(p)].step if id(p) in layouts_of else whole
            for inner, x in found:
                self._enter_state(inner, x, step if x.shape == p.shape else whole, known)
        for name, values in _of_no_parameter(what, optimizer):
            for inner, x in _named(name, values):
                self._enter_state(inner, x, whole, known)

    def _enter_state(self, name: str, x: Any, sbp: NdSbp, known: set[int]) -> None:
        """Add a tensor of an optimizer, unless it is among those in ``known`` (ids)."""
        if not is_global(x):
            self._enter_plain(name, x)
        elif id(x) not in known:
            known.add(id(x))
            self.state.append(self._moved(name, x, sbp))

    def _enter_plain(self, name: str, x: torch.Tensor) -> None:
        """Add a plain tensor, unless it is on ``meta``."""
        if not x.is_meta:
            self.plain[name] = x


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    """Return an iterator over the parameters of an optimizer, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _of_no_parameter(what: str, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return named dicts of what an optimizer holds beside the state of its parameters.

    These are its parameter groups, state of other keys, and its attributes; tensors in them are
    moved, too.
    """
    for k, group in enumerate(optimizer.param_groups):
        yield f"{what} group {k}", {key: x for key, x in group.items() if key != "params"}
    own = {id(p) for p in params_of(optimizer)}
    others = [values for key, values in optimizer.state.items() if id(key) not in own]
    yield f"{what} state", {f"other {k}": values for k, values in enumerate(others)}
    known = ("state", "param_groups", "defaults", "_masters", "_owned")
    yield what, {key: x for key, x in vars(optimizer).items() if key not in known}


def _named(name: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return (name, tensor) of the tensors in a dict's values, which may be nested.

    Names begin with ``name``, as ``optimizer[fc.weight].exp_avg``, and are equal on every rank.
    """
    for key, value in values.items():
        found = tensors_in(value)
        for i, x in enumerate(found):
            yield f"{name}.{key}" + (f"[{i}]" if len(found) > 1 else ""), x
