"""Division of a model into units (modules that run one after another), grouped into kinds of equal
units.

The model is run once in a simulation of a single rank. Two units are of one kind if they called the
same ops on the same shapes with the same arguments, and have parameters of the same shapes: their
costs are then equal, whatever their attributes are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...graph.module_calls import module_calls
from ...graph.reads import is_followed
from ...pipeline.cut import Unit, parts
from ...pipeline.pipeline import loss_of
from ...spec.nested import map_tensors, tensors_in
from ..machines import Machine
from ..simulation.log import Op
from ..simulation.simulate import Simulation, simulate

_MAKE = "what stands for blanks"


def filled(given: Any, make: Callable[[Blank], Any]) -> Any:
    """Return a deep copy of ``given`` in which each ``Blank``, at any depth, is replaced by the
    tensor that ``make`` returns for it."""
    memo: dict[Any, Any] = {_MAKE: make}
    return copy.deepcopy(given, memo)


@dataclass(frozen=True)
class Blank:
    """Description of a tensor without values, which stands for it in recorded arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tracked: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """Return the blank itself, or its replacement inside ``filled``."""
        make = memo.get(_MAKE)
        return self if make is None else make(self)


@dataclass
class Call:
    """Recorded call of a unit, or of the loss, from which the unit can be run again.

    Args:
        name: name of the unit; "" is the loss.
        given: (args, kwargs), with a ``Blank`` in place of each imagined tensor.
        out: the ``Blank`` of each tensor of the result.
    """

    name: str
    kind: Hashable
    given: Any
    out: list[Blank]


@dataclass
class Followed:
    """Recorded calls of a model that was run on a micro-batch of some number of rows.

    Args:
        calls: calls in the order in which they are made, the loss last.
        in_order: whether each unit is called once, in the order in which units are defined.
    """

    calls: list[Call]
    in_order: bool


def units_of(model: nn.Module, stages: int) -> list[Unit]:
    """Return the units that can be distributed over ``stages`` stages, in the order of
    definition."""
    return [unit for unit in parts(model, max(stages, 2)) if unit.name]


def follow(
    model: nn.Module,
    units: Sequence[Unit],
    loss: Callable[..., Any] | None,
    given: Any,
    machine: Machine,
    bound: float | None,
) -> Followed:
    """Run the model on imagined tensors, and record the arguments of each unit.

    Args:
        given: (args, kwargs, target) of a micro-batch.
    """
    with simulate(1, machine, bound=bound) as sim:
        model = imagined_copy(sim, model)
        following = _Following(sim, model, [unit.name for unit in units])
        args, kwargs, target = map_tensors(given, lambda x: _imagined(sim, x))
        with following.listening():
            out = model(*args, **kwargs)
        following.enter("", ((out, target), {}))
        value = loss_of(model, loss, out, target)
        following.leave("", value)
    names = [call.name for call in following.calls]
    return Followed(following.calls, names == [*(u.name for u in units), ""])


def imagined_copy(sim: Simulation, module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose parameters and buffers have no values and take no
    memory."""
    memo: dict[int, Any] = {}
    for x in (*module.parameters(), *module.buffers()):
        made = sim.imagined.empty(x.shape, x.dtype)
        if isinstance(x, nn.Parameter):
            made = nn.Parameter(made, requires_grad=x.requires_grad)
        memo[id(x)] = made
    return copy.deepcopy(module, memo)


def _imagined(sim: Simulation, x: Tensor) -> Tensor:
    """Return an imagined tensor for ``x``, or ``x`` itself if programs may read its values."""
    if is_followed(x):
        return x
    return sim.imagined.empty(x.shape, x.dtype)


class _Following:
    """Recorder of the calls of units, in the order in which they end."""

    def __init__(self, sim: Simulation, model: nn.Module, names: Sequence[str]) -> None:
        self._sim, self._model, self._names = sim, model, names
        self._begun: dict[str, tuple[int, Any]] = {}
        self.calls: list[Call] = []

    def enter(self, name: str, given: Any) -> None:
        """Note that a call of unit ``name`` begins, and copy its arguments."""
        blank = self._copied(given)
        self._begun[name] = len(self._sim.events), blank

    def leave(self, name: str, out: Any) -> None:
        """Note that a call of unit ``name`` ends, and record it."""
        begin, given = self._begun.pop(name)
        ops = tuple(e.work.key for e in self._sim.events[begin:] if isinstance(e, Op))
        module = self._model.get_submodule(name) if name else nn.Module()
        held = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
        outs = [x for x in map(self._blank, tensors_in(out)) if isinstance(x, Blank)]
        self.calls.append(Call(name, (ops, held, name == ""), given, outs))

    def listening(self) -> AbstractContextManager[None]:
        """Return a context manager inside which calls of units are recorded."""
        units = ((name, self._model.get_submodule(name)) for name in self._names)
        return module_calls(units, lambda name, *given: self.enter(name, given), self.leave)

    def _copied(self, given: Any) -> Any:
        """Return a copy of the arguments of a call with a ``Blank`` in place of each tensor.

        They are copied before the unit runs, because later units may write into them, such as into
        a cache of keys.
        """
        with _CopyingTensors(self._blank):
            try:
                return copy.deepcopy(given)
            except (TypeError, RuntimeError):  # something inside cannot be copied
                return map_tensors(given, self._blank)

    def _blank(self, x: Tensor) -> Any:
        if self._sim.imagined.memory.number(x) is None:
            return x.detach()  # a small tensor with real values
        return Blank(tuple(x.shape), x.dtype, x.requires_grad)


class _CopyingTensors(TorchFunctionMode):
    """Torch function mode under which ``copy.deepcopy`` replaces each tensor instead of copying
    it."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return self._change(args[0])
        return func(*args, **(kwargs or {}))
