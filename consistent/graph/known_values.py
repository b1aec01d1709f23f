"""Values of global tensors without data, computed op by op while a step is recorded."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ..dispatch.plans.arguments import fill
from ..dispatch.plans.shards import HookOff, is_global
from ..rules.notation.holds import is_integral
from ..spec.nested import tensors_in
from .effects import version
from .reads import is_followed, result_by_values


class _KnownValue(NamedTuple):
    """Value of the global tensor ``x``, which holds until its spec or its version changes.

    The tensor is kept alive, so that its id is not used again.
    """

    x: Any
    spec: Any
    version: int
    value: torch.Tensor


class KnownValues:
    """Known integer and bool values of global tensors that have no data, while a step is recorded.

    Its methods ``op``, ``adopt``, ``get`` and ``shapes_of`` are callbacks of a ``Tracer``. Results
    of ops on known values are known too, so that a model may read them while a plan is searched for
    it, for example to check for padding.
    """

    def __init__(self) -> None:
        self._known: dict[int, _KnownValue] = {}

    def put(self, x: Any, value: torch.Tensor) -> None:
        """Note the logical value of the global tensor ``x``, if ``is_followed`` accepts it.

        It accepts integers and bools that are not too many.
        """
        if is_followed(value):
            self._known[id(x)] = _KnownValue(x, x._spec, version(x), value)

    def get(self, x: Any) -> torch.Tensor | None:
        """Return the value of the tensor ``x``, or None if it is not known.

        A plain tensor is its own value, unless it is on ``meta``.
        """
        if not is_global(x):
            return None if x.is_meta else x
        known = self._known.get(id(x))
        if known is None or known.spec is not x._spec or known.version != version(x):  # type: ignore[attr-defined]
            return None
        return known.value

    def adopt(self, x: torch.Tensor, global_x: Any) -> None:
        """Note the value of ``global_x``, the global tensor that an op has made of a plain one."""
        if not x.is_meta:
            self.put(global_x, x.detach())

    def op(self, plan: Any, given: list[Any], out: Any, *_: Any) -> None:
        """Compute the result of an op if the values of all its operands are known.

        The arguments are those of ``Tracer.on_op_end``. If the op may modify a known operand, all
        values are forgotten, as other known tensors may be views of that operand.
        """
        operands = [x for x in given if is_global(x)]
        known = [value for x in operands if (value := self.get(x)) is not None]
        call = plan.call
        # Code without a rule, such as an autograd Function, has no operands in its call: it may
        # modify any of its arguments.
        may_write = call.inplace or plan.writes or len(call.operands) != len(operands)
        if may_write:
            if known or all(is_integral(x._spec.dtype) for x in operands[:1]):
                self._known.clear()
        elif known and len(known) == len(operands) and not _is_random_op(plan.name):
            try:
                with HookOff():
                    result = plan.function(*fill(call.args, known), **fill(call.kwargs, known))
            except Exception:  # the function works on shards only
                return
            for x, value in zip(tensors_in(out), tensors_in(result)):
                if is_global(x):
                    self.put(x, value)

    def shapes_of(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result on ``meta`` of a call whose shapes depend on values; None if unknown.

        It is the callback ``Tracer.shapes_of``.
        """
        return result_by_values(function, (args, kwargs), self.get)


@cache
def _is_random_op(name: str) -> bool:
    """Return whether torch's op ``name`` draws random numbers; ``KnownValues`` runs no such op."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )
