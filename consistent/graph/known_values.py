"""Values of global tensors without data, followed from op to op while a program is recorded."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.plans.arguments import fill
from ..dispatch.plans.shards import HookOff, is_global
from ..spec.nested import tensors_in
from .reads import is_followed, result_by_values


class KnownValues:
    """Whole numbers and truth values that global tensors without data stand for.

    Its methods ``op``, ``adopt`` and ``get`` are callbacks of a ``Tracer``: what an op makes of
    known values is known, so that a model may read it, for example to check for padding.
    """

    def __init__(self) -> None:
        # By identity. The tensors are kept alive, so that no id is used again.
        self._values: dict[int, tuple[Any, Any, torch.Tensor]] = {}

    def put(self, x: Any, value: torch.Tensor) -> None:
        """Note the logical ``value`` of the global tensor ``x``, unless it is too large or no whole
        number."""
        if is_followed(value):
            self._values[id(x)] = x, x._spec, value

    def get(self, x: Any) -> torch.Tensor | None:
        """Return the value of a tensor, or None if it is not known. A plain tensor is its own value
        if it has one."""
        if not is_global(x):
            return None if x.is_meta else x
        _, spec, value = self._values.get(id(x), (None, None, None))
        return value if spec is x._spec else None  # type: ignore[attr-defined]

    def adopt(self, x: torch.Tensor, made: Any) -> None:
        """Note the value of ``made``, the global tensor that an op has made of a plain one."""
        if not x.is_meta:
            self.put(made, x.detach())

    def op(self, plan: Any, given: list[Any], out: Any, *_: Any) -> None:
        """Compute the result of an op if the values of all its operands are known.

        The arguments are those of ``Tracer.on_op_end``.
        """
        operands = [x for x in given if is_global(x)]
        known = [value for x in operands if (value := self.get(x)) is not None]
        if plan.call.inplace:
            dtype = operands[0]._spec.dtype
            if known or not (dtype.is_floating_point or dtype.is_complex):
                self._values.clear()  # known values may be views of what it writes
        elif known and len(known) == len(operands):
            try:
                with HookOff():
                    call = plan.call
                    made = plan.function(*fill(call.args, known), **fill(call.kwargs, known))
            except Exception:  # the function works on shards only
                return
            for x, value in zip(tensors_in(out), tensors_in(made)):
                if is_global(x):
                    self.put(x, value)

    def shapes_of(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what ``Tracer.shapes_of`` does."""
        return result_by_values(function, (args, kwargs), self.get)
