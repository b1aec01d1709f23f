"""Ops that may raise on some ranks alone, as programs hold them: each is a message, after which all
ranks raise what one of them met (``dispatch/running/agreed.py``).

Where a loss tells by the sum that it makes next, its ops send nothing while all is well:

```
as written    look at targets              | count, tell | ...
a program     attempt: look at targets     | count, tell | ...     a rank that has met an error
                                                                   tells in place of the count
```
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current

from ..dispatch.running.agreed import heed, tell
from ..forms.refused import kinds
from ..rules.raising import raises_inside
from ..spec.nested import map_tensors, tensors_in
from .opaque import Call, shape_of

KIND = "tell"  # of what is sent once more where another op went before it


def may_raise(func: Any) -> bool:
    """Whether an op of torch is one that may raise by value."""
    return raises_inside(func._schema.name.partition("::")[2].rstrip("_"))


class Agreed:
    """An op on this rank's shards, and the ranks that tell each other how it went, if they may
    differ.

    It gives tensors of its own that are contiguous, as results of messages are: what an op writes
    in place comes as its first result, and where there is none, it is an empty tensor.

    With ``tells_later`` ranks on which it went well tell each other by the next message.
    """

    def __init__(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        ranks: Ranks,
        tells_later: bool = False,
    ) -> None:
        self.func, self.ranks, self.tells_later = func, ranks, tells_later
        self.given = map_tensors((args, kwargs), lambda _: _HERE)
        self.writes = func._schema.is_mutable

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        error, out = None, None
        try:
            out = self.run(xs)
        except Exception as raised:
            kind = kinds.get(str(raised))
            error = raised if kind is None else kind(str(raised))
        if error is not None and not self.ranks:
            raise error
        if self.ranks and not (self.tells_later and error is None):
            tell(error, self.ranks)
        return self.results(out, xs)

    def run(self, xs: list[Tensor]) -> Any:
        """What the op gives; ``xs`` are not written to."""
        xs = [xs[0].clone(), *xs[1:]] if self.writes else xs
        args, kwargs = _filled(self.given, iter(xs))
        return self.func(*args, **kwargs)

    def results(self, out: Any, xs: list[Tensor]) -> list[Tensor]:
        """The tensors of what the op gave."""
        return [x.contiguous() for x in tensors_in(out)] or [xs[0].new_empty(0)]

    def call(self, results: list[Tensor]) -> Call:
        """It, as a program keeps it."""
        name, kind = str(self.func), "attempt" if self.tells_later else "agree"
        return Call(
            f"{kind} {name} {self.given!r} over {self.ranks}",
            self,
            tuple(map(shape_of, results)),
            kind,
            name,
            () if self.tells_later else self.ranks,
            0,
            computes=True,
        )

    def told_later(self) -> Agreed:
        """Return the same op, whose ranks tell each other by the next message."""
        args, kwargs = self.given
        return Agreed(self.func, args, kwargs, self.ranks, True)


class Heard:
    """Takes its place on a rank outside, of which a kernel for ``meta`` tensors would tell nothing:
    it hears how the op went."""

    def __init__(self, func: Any, ranks: Ranks) -> None:
        self.func, self.ranks = func, ranks

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        tell(None, self.ranks)
        return []

    def call(self) -> Call:
        """It, as a program keeps it."""
        name, ranks = str(self.func), self.ranks
        return Call(f"hear {name} over {ranks}", self, (), "agree", name, ranks, computes=True)


class SumAndTell:
    """The sum of a few numbers over ``ranks``, in whose message those that are ``told`` tell each
    other that ops before it went well; else all raise what one of them met."""

    def __init__(self, ranks: Ranks, told: Ranks, op: str) -> None:
        self.ranks, self.told, self.op = ranks, told, op

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        notes, total = current().all_reduce_with_notes(xs[0], self.ranks, self.told, self.op)
        heed(notes, self.told)
        assert total is not None
        return [total.contiguous()]

    def call(self, total: Tensor, sent: int) -> Call:
        """It, as a program keeps it."""
        name = f"all_reduce({self.op})"
        text = f"tell {self.told} and {name} over {self.ranks}"
        return Call(text, self, (shape_of(total),), KIND, name, self.told, sent, computes=True)


class _Here:
    """Stands where a tensor stood."""

    def __repr__(self) -> str:
        return "x"


_HERE = _Here()


def _filled(value: Any, left: Iterator[Tensor]) -> Any:
    if value is _HERE:
        return next(left)
    if isinstance(value, dict):
        return {key: _filled(x, left) for key, x in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_filled(x, left) for x in value)
    return value
