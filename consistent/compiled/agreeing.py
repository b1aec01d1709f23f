"""Recorded form of ops that may raise on some ranks only, such as a loss that checks its targets.

Each becomes a message, after which all ranks raise the error that one of them met
(``dispatch/running/agreed.py``); otherwise the other ranks would wait for it forever. If the next
message is a sum that can carry the errors too, these ops send nothing unless they raise:

```
as written    check targets                | all-reduce of a count, with errors | ...
a program     attempt: check targets       | all-reduce of a count, with errors | ...
              a rank that met an error sends the error in place of the count
```
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mirrored.comm import Ranks
from mirrored.transports.default import current

from ..dispatch.running.agreed import heed, tell
from ..forms.refused import kinds
from ..rules.raising import raises_inside
from ..spec.nested import map_tensors, replace_each, tensors_in
from .opaque import OpaqueCall, shape_of

KIND = "tell"  # kind of a sum that also tells how the ops before it went; never merged


def may_raise(func: Any) -> bool:
    """Return whether ``func`` is a torch op that may raise depending on the values of its
    tensors."""
    return raises_inside(func._schema.name.partition("::")[2].rstrip("_"))


class Agreed:
    """Callable that runs an op on this rank's shards, and then exchanges with ``ranks`` whether it
    raised.

    With empty ``ranks``, it raises on this rank alone. The results are contiguous tensors with
    memory of their own, like those of messages. If the op writes in place, the written tensor is
    returned as the first result; if the op returns no tensor, the result is one empty tensor.

    With ``tells_later``, ranks on which the op succeeded report this in the next message instead.
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
            # A rank with an error tells at once even if the others tell later: it takes part in
            # their next exchange of notes, and stops there.
            tell(error, self.ranks)
        return self.results(out, xs)

    def run(self, xs: list[Tensor]) -> Any:
        """Run the op on ``xs`` and return its result.

        ``xs`` are not modified, as a custom op requires: the target of an in-place op is cloned
        first.
        """
        xs = [xs[0].clone(), *xs[1:]] if self.writes else xs
        args, kwargs = replace_each(self.given, _Here, xs)
        return self.func(*args, **kwargs)

    def results(self, out: Any, xs: list[Tensor]) -> list[Tensor]:
        """Return the tensors in ``out``, made contiguous; if there are none, one empty tensor."""
        # An op that returns nothing still needs a result, by which the recorder finds its message.
        return [x.contiguous() for x in tensors_in(out)] or [xs[0].new_empty(0)]

    def call(self, results: list[Tensor]) -> OpaqueCall:
        """Return the ``OpaqueCall`` that represents the op in a program; ``results`` are those of
        the recorded run."""
        name, kind = str(self.func), "attempt" if self.tells_later else "agree"
        return OpaqueCall(
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
        """Return the same op with ``tells_later``: its ranks report success in the next message."""
        args, kwargs = self.given
        return Agreed(self.func, args, kwargs, self.ranks, True)


class Heard:
    """Stand-in for an ``Agreed`` op on a rank outside the op's placement, which only receives the
    outcome.

    A kernel for ``meta`` tensors would not raise there, so the other ranks must report errors.
    """

    def __init__(self, func: Any, ranks: Ranks) -> None:
        self.func, self.ranks = func, ranks

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        tell(None, self.ranks)
        return []

    def call(self) -> OpaqueCall:
        """Return the ``OpaqueCall`` that represents the stand-in in a program."""
        name, ranks = str(self.func), self.ranks
        return OpaqueCall(
            f"hear {name} over {ranks}", self, (), "agree", name, ranks, computes=True
        )


class SumAndTell:
    """Callable that sums a few numbers over ``ranks``, and exchanges errors in the same message.

    The ranks ``told`` report that the ops before it succeeded; otherwise all of them raise the
    error that one of them met.
    """

    def __init__(self, ranks: Ranks, told: Ranks, op: str) -> None:
        self.ranks, self.told, self.op = ranks, told, op

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        notes, total = current().all_reduce_with_notes(xs[0], self.ranks, self.told, self.op)
        heed(notes, self.told)
        assert total is not None
        return [total.contiguous()]

    def call(self, total: Tensor, sent: int) -> OpaqueCall:
        """Return the ``OpaqueCall`` that represents the sum in a program.

        ``total`` is the result in the recorded run, and ``sent`` the number of bytes that this rank
        sends.
        """
        name = f"all_reduce({self.op})"
        text = f"tell {self.told} and {name} over {self.ranks}"
        return OpaqueCall(
            text, self, (shape_of(total),), KIND, name, self.told, sent, computes=True
        )


class _Here:
    """Placeholder for a tensor in recorded arguments."""

    def __repr__(self) -> str:
        return "x"


_HERE = _Here()
