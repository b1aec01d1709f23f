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
class TensorMove:
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
    params: list[TensorMove] = field(default_factory=list)
    buffers: list[TensorMove] = field(default_factory=list)
    grads: dict[int, TensorMove] = field(default_factory=dict)
    state: list[TensorMove] = field(default_factory=list)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[TensorMove]:
        """Return all tensors that are moved, in an order that is the same on every rank."""
        return [*self.params, *self.buffers, *self.grads.values(), *self.state]

    def collect_tensors(self, slots: Sequence[Sequence[Slot]]) -> None:
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
                self._add_parameter(places[0].name, x, layouts)
                layouts_of[id(x)] = layouts
            else:
                self.buffers.append(self._tensor_to_move(places[0].name, x, layouts.sbp))
        for i, optimizer in enumerate(self.optimizers):
            self._add_optimizer(f"optimizer {i}" if i else "optimizer", optimizer, layouts_of)
        for places in [*plain_slots(self.model), *plain_attributes(self.model)]:
            self._add_plain(places[0].name, places[0].value)

    def _tensor_to_move(self, name: str, x: Any, sbp: NdSbp) -> TensorMove:
        """Return ``x`` as a tensor to move, with the layout ``sbp`` on the new placement."""
        return TensorMove(name, x, x._spec, TensorSpec.of(self.placement, sbp, x.shape, x.dtype))

    def _add_parameter(self, name: str, x: Any, layouts: Layouts) -> None:
        """Add a parameter and its gradient, if it has one."""
        grad = raw_grad(x)
        if grad is not None:
            self.grads[len(self.params)] = self._tensor_to_move(f"{name}.grad", grad, layouts.grad)
        self.params.append(self._tensor_to_move(name, x, layouts.sbp))

    def _add_optimizer(
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
        names = {id(item.tensor): item.name for item in self.params}
        masters, known_ids = masters_of(optimizer), {id(item.tensor) for item in self.tensors()}
        replicated = (B,) * self.placement.ndim
        for p in params_of(optimizer):
            name = f"{what}[{names.get(id(p), 'a plain parameter')}]"
            named_tensors = [*_named_tensors(name, optimizer.state.get(p, {}))]
            if masters is not None and p in masters.copies:
                named_tensors.append((f"{name}.master", masters.copies[p][0]))
            step = layouts_of[id(p)].step if id(p) in layouts_of else replicated
            for tensor_name, x in named_tensors:
                self._add_state(
                    tensor_name, x, step if x.shape == p.shape else replicated, known_ids
                )
        for name, values in _state_beside_parameters(what, optimizer):
            for tensor_name, x in _named_tensors(name, values):
                self._add_state(tensor_name, x, replicated, known_ids)

    def _add_state(self, name: str, x: Any, sbp: NdSbp, known_ids: set[int]) -> None:
        """Add a tensor of an optimizer, unless it is among those in ``known_ids``."""
        if not is_global(x):
            self._add_plain(name, x)
        elif id(x) not in known_ids:
            known_ids.add(id(x))
            self.state.append(self._tensor_to_move(name, x, sbp))

    def _add_plain(self, name: str, x: torch.Tensor) -> None:
        """Add a plain tensor, unless it is on ``meta``."""
        if not x.is_meta:
            self.plain[name] = x


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    """Return an iterator over the parameters of an optimizer, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _state_beside_parameters(
    what: str, optimizer: Optimizer
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return named dicts of what an optimizer has in addition to the state of its parameters.

    These are its parameter groups, state of other keys, and its attributes; tensors in them are
    moved, too.
    """
    for k, group in enumerate(optimizer.param_groups):
        yield f"{what} group {k}", {key: x for key, x in group.items() if key != "params"}
    param_ids = {id(p) for p in params_of(optimizer)}
    other_state = [values for key, values in optimizer.state.items() if id(key) not in param_ids]
    yield f"{what} state", {f"other {k}": values for k, values in enumerate(other_state)}
    handled_keys = ("state", "param_groups", "defaults", "_masters", "_owned")
    yield what, {key: x for key, x in vars(optimizer).items() if key not in handled_keys}


def _named_tensors(name: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return (name, tensor) of the tensors in a dict's values, which may be nested.

    Names begin with ``name``, as ``optimizer[fc.weight].exp_avg``, and are equal on every rank.
    """
    for key, value in values.items():
        tensors = tensors_in(value)
        for i, x in enumerate(tensors):
            yield f"{name}.{key}" + (f"[{i}]" if len(tensors) > 1 else ""), x
