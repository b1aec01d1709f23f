"""Values of global tensors without data, followed from op to op while a program is recorded.

```
mask = tokens > 2           its value is known if that of ``tokens`` is
if mask.all():              so the recorder answers, and keeps the question: the program serves
                            only tokens for which the steps that made the value give it again
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..dispatch.plans.arguments import fill
from ..dispatch.plans.shards import HookOff, is_global
from ..spec.nested import map_each, map_tensors, tensors_in
from .effects import version
from .program import Ref
from .reads import is_followed, result_by_values, shapes_by_values


class Earlier(NamedTuple):
    """Placeholder for a tensor in the result of an earlier step."""

    step: int
    item: int


Step = tuple[Callable[..., Any], tuple, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class _Known:
    """Value of a tensor, and what it follows from.

    Args:
        x: the global tensor, kept alive so that its id is not used again.
        spec, version: its spec, and its version counter; after a change of either the value is not
            known any more.
        sources: plain tensors from which the value follows, with their version counters then.
        origin: where the value comes from: a plain tensor, a ``Ref`` to one, or the step that
            computed it, whose arguments have a ``_Known`` in place of each tensor.
        item: position of the value among the results of that step.
    """

    x: Any
    spec: Any
    version: int
    value: torch.Tensor
    sources: tuple[tuple[torch.Tensor, int], ...]
    origin: Any
    item: int = 0

    @property
    def holds(self) -> bool:
        """Whether nothing has been written since into the tensor or into what it follows from."""
        same = self.spec is self.x._spec and self.version == version(self.x)
        return same and all(version(source) == before for source, before in self.sources)


class KnownValues:
    """Whole numbers and truth values that global tensors without data stand for.

    Its methods ``op``, ``adopt``, ``get`` and ``shapes_of`` are callbacks of a ``Tracer``: what an
    op makes of known values is known, so that a model may read it, for example to check for
    padding.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def put(self, x: Any, value: torch.Tensor, origin: Ref | None = None) -> None:
        """Note the logical value of the global tensor ``x``, unless it is too large or no whole
        number. The program finds the plain tensor ``value`` again by ``origin``."""
        self._put(x, value, ((value, version(value)),), value if origin is None else origin)

    def _put(self, x: Any, value: torch.Tensor, sources: Any, origin: Any, item: int = 0) -> None:
        if is_followed(value):
            known = _Known(x, x._spec, version(x), value, sources, origin, item)
            self._known[id(x)] = known

    def clear(self) -> None:
        """Forget all values, because some may have been overwritten."""
        self._known.clear()

    def get(self, x: Any) -> torch.Tensor | None:
        """Return the value of a tensor, or None if it is not known. A plain tensor is its own value
        if it has one."""
        if not is_global(x):
            return None if x.is_meta else x
        known = self._of(x)
        return None if known is None else known.value

    def _of(self, x: Any) -> _Known | None:
        known = self._known.get(id(x))
        return known if known is not None and known.holds else None

    def adopt(self, x: torch.Tensor, made: Any) -> None:
        """Note the value of ``made``, the global tensor that an op has made of a plain one."""
        if not x.is_meta:
            self.put(made, x.detach())

    def op(self, plan: Any, given: list[Any], out: Any, *_: Any) -> None:
        """Compute the result of an op if the values of all its operands are known.

        The arguments are those of ``Tracer.on_op_end``.
        """
        operands = [x for x in given if is_global(x)]
        known = [found for x in operands if (found := self._of(x)) is not None]
        call = plan.call
        if call.inplace:
            dtype = operands[0]._spec.dtype
            if known or not (dtype.is_floating_point or dtype.is_complex):
                self.clear()  # known values may be views of what it writes
        elif known and len(known) == len(operands) == len(call.operands):
            try:
                values = [each.value for each in known]
                with HookOff():
                    made = plan.function(*fill(call.args, values), **fill(call.kwargs, values))
            except Exception:  # the function works on shards only
                return
            step = plan.function, fill(call.args, known), fill(call.kwargs, known)
            sources = tuple({id(s): (s, v) for each in known for s, v in each.sources}.values())
            for item, (x, value) in enumerate(zip(tensors_in(out), tensors_in(made))):
                if is_global(x):
                    self._put(x, value, sources, step, item)

    def shapes_of(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what ``Tracer.shapes_of`` does."""
        return result_by_values(function, (args, kwargs), self.get)

    # -- how a program asks again ------------------------------------------------------------------

    def value_question(self, x: Any) -> tuple[Callable[..., Any], tuple]:
        """Return (function, arguments) by which a program computes the value of ``x`` again.

        The arguments contain a ``Ref`` for each plain tensor of the program.
        """
        steps: list[Step] = []
        return value_after, (steps, self._again(self._known[id(x)], steps, {}))

    def shapes_question(
        self, function: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple]:
        """Return (function, arguments) by which a program computes the shapes that ``shapes_of``
        has given for a call."""
        steps: list[Step] = []
        done: dict[int, int] = {}

        def again(x: Any) -> Any:
            known = self._of(x) if is_global(x) else None
            return x if known is None else self._again(known, steps, done)

        return shapes_after, (steps, function, *map_tensors((args, kwargs), again))

    def _again(self, known: _Known, steps: list[Step], done: dict[int, int]) -> Any:
        """Append the steps that make a value to ``steps``, and return where it is found then.

        ``done`` has the steps that were appended already.
        """
        if not isinstance(known.origin, tuple):
            return known.origin
        key = id(known.origin)
        if key not in done:
            function, *given = known.origin
            args, kwargs = map_each(
                tuple(given), _Known, lambda each: self._again(each, steps, done)
            )
            steps.append((function, args, kwargs))
            done[key] = len(steps) - 1
        return Earlier(done[key], known.item)


def value_after(steps: list[Step], found: Any) -> Any:
    """Return the value ``found`` after the steps, as an array that can be compared."""
    return _filled(found, _results(steps)).numpy()


def shapes_after(
    steps: list[Step], function: Any, args: tuple, kwargs: dict[str, Any]
) -> list[tuple[int, ...]]:
    """Return the shapes in the result of a call, whose known operands follow from the steps."""
    return shapes_by_values(function, *_filled((args, kwargs), _results(steps)))


def _results(steps: list[Step]) -> list[list[torch.Tensor]]:
    results: list[list[torch.Tensor]] = []
    for function, *given in steps:
        args, kwargs = _filled(tuple(given), results)
        with HookOff():
            results.append(tensors_in(function(*args, **kwargs)))
    return results


def _filled(given: Any, results: list[list[torch.Tensor]]) -> Any:
    return map_each(given, Earlier, lambda at: results[at.step][at.item])
