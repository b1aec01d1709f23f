"""Which values of a step share memory on one device, and when an op modifies it in place.

```
h = linear(x)       0
v = h.view(2, 3)    1   v shares the memory of h
v.add_(1)           2   so h and v are written at 2: neither may be boxed before, as the write would
                        go to a copy
```
"""

from __future__ import annotations

from collections.abc import Iterable

from ..graph.global_ops import MOVE, Op


class AliasedValues:
    """Record of which values of a step share memory, and of the ops that modify it in place.

    A search reads from it which values must not be boxed, since a write would then go to a copy.

    Args:
        ops: (position in the program, op) for each op, in order.
        same: pairs of values that are one tensor, as the operand and the result of ``contiguous()``
            may be.
    """

    def __init__(self, ops: Iterable[tuple[int, Op]], same: Iterable[tuple[int, int]] = ()) -> None:
        self._parents: dict[int, int] = {}  # value -> another that shares its memory
        writes: list[tuple[int, int]] = []
        for a, b in same:
            self._merge(a, b)
        for position, op in ops:
            if op.call.inplace and op.ins:
                writes.append((position, op.ins[0]))
            if op.ins and (op.call.inplace or _is_view(op)):
                for out in op.outs:
                    self._merge(op.ins[0], out)
        self._last_writes: dict[int, int] = {}  # memory -> position of the last write into it
        for position, v in writes:
            self._last_writes[self._root(v)] = position

    def is_written_after(self, v: int, at: int) -> bool:
        """Return whether an op after position ``at`` modifies the memory of value ``v`` in place.

        It may do so through another value that shares the memory, such as a view.
        """
        return self._last_writes.get(self._root(v), -1) > at

    def must_stay(self, op: Op, at: int) -> bool:
        """Return whether the first operand of ``op``, at position ``at``, must not be boxed.

        It must not if the op writes it, or returns a view of memory that a later op writes.
        """
        if not op.ins:
            return False
        return op.call.inplace or (_is_view(op) and self.is_written_after(op.ins[0], at))

    def _root(self, v: int) -> int:
        """Return the value that stands for all that share the memory of ``v`` (a union-find)."""
        while (parent := self._parents.get(v, v)) != v:
            v = parent
        return v

    def _merge(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parents[max(a, b)] = min(a, b)


def _is_view(op: Op) -> bool:
    return op.view and op.kind != MOVE  # a move to another layout makes a copy
