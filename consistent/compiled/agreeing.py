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

from ..dispatch.running.agreed import exchange_errors, raise_first_error
from ..forms.refused import error_types
from ..rules.raising import raises_inside
from ..spec.nested import map_tensors, replace_instances, tensors_in
from .opaque import OpaqueCall, shape_of

SUM_WITH_ERRORS = "tell"  # kind of a sum whose message also exchanges errors of the ops before it


def may_raise(func: Any) -> bool:
    """Return whether the torch op ``func`` may raise depending on the values of its tensors.

    Examples: ``nll_loss``, for a target out of range, and ``linalg_inv``, for a singular matrix.
    """
    return raises_inside(func._schema.name.partition("::")[2].rstrip("_"))


class AgreedOp:
    """Callable that runs an op on this rank's shards; if one of ``ranks`` raises in it, all raise.

    A program contains it in place of an op that may raise on some ranks only. To a compiler it is a
    message between ranks. Its results are contiguous tensors with memory of their own, like those
    of messages. If the op writes in place, the written tensor is the first result; if it returns no
    tensor, the result is one empty tensor.

    Args:
        func, args, kwargs: the recorded call; each run puts other tensors in place of those in it.
        ranks: ranks that exchange, after the op, which error each of them met, if any. If empty,
            the error is raised on this rank alone.
        defers_report: do not exchange this after an op that has succeeded, because the next message
            carries that report. A rank with an error still reports it at once.
    """

    def __init__(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        ranks: Ranks,
        defers_report: bool = False,
    ) -> None:
        self.func, self.ranks, self.defers_report = func, ranks, defers_report
        self.recorded_arguments = map_tensors((args, kwargs), lambda _: _TENSOR_PLACEHOLDER)
        self.writes = func._schema.is_mutable

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        error, out = None, None
        try:
            out = self.run(xs)
        except Exception as exception:
            kind = error_types.get(str(exception))
            error = exception if kind is None else kind(str(exception))
        if error is not None and not self.ranks:
            raise error
        if self.ranks and not (self.defers_report and error is None):
            # With ``defers_report``, only a rank with an error is here: it joins the exchange which
            # the other ranks begin with their next sum, and all raise.
            exchange_errors(error, self.ranks)
        return self.results(out, xs)

    def run(self, xs: list[Tensor]) -> Any:
        """Run the op on ``xs`` in place of the recorded tensors, and return its result.

        ``xs`` are not modified, as torch requires of a custom op: an in-place op modifies a clone
        of its first tensor.
        """
        xs = [xs[0].clone(), *xs[1:]] if self.writes else xs
        args, kwargs = replace_instances(self.recorded_arguments, _TensorPlaceholder, xs)
        return self.func(*args, **kwargs)

    def results(self, out: Any, xs: list[Tensor]) -> list[Tensor]:
        """Return the tensors in ``out``, made contiguous; if there are none, one empty tensor.

        The recorder finds the message in the graph by its results, so there must be at least one.
        """
        # An op that returns nothing still needs a result, by which the recorder finds its message.
        return [x.contiguous() for x in tensors_in(out)] or [xs[0].new_empty(0)]

    def call(self, results: list[Tensor]) -> OpaqueCall:
        """Return the ``OpaqueCall`` that represents the op in a program.

        ``results`` are the tensors that ``results()`` gave when the op ran during the recording;
        the call stores their shapes, dtypes and devices.
        """
        name, kind = str(self.func), "attempt" if self.defers_report else "agree"
        return OpaqueCall(
            f"{kind} {name} {self.recorded_arguments!r} over {self.ranks}",
            self,
            tuple(map(shape_of, results)),
            kind,
            name,
            () if self.defers_report else self.ranks,
            0,
            computes=True,
        )

    def with_deferred_report(self) -> AgreedOp:
        """Return the same op with ``defers_report`` set, so that it sends nothing unless it raises.

        The recorder calls this once it finds that the next message is a sum that can carry the
        report.
        """
        args, kwargs = self.recorded_arguments
        return AgreedOp(self.func, args, kwargs, self.ranks, True)


class ErrorExchange:
    """Callable that replaces an ``AgreedOp`` on a rank outside the placement of the op's tensors.

    Such a rank runs ops on ``meta`` tensors, which have no values that could raise. So the callable
    computes nothing: it takes part in the exchange of errors between ``ranks``, and raises the
    error of another rank, if there is one.
    """

    def __init__(self, func: Any, ranks: Ranks) -> None:
        self.func, self.ranks = func, ranks

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        exchange_errors(None, self.ranks)
        return []

    def call(self) -> OpaqueCall:
        """Return the ``OpaqueCall`` that represents this exchange in the outside rank's program."""
        name, ranks = str(self.func), self.ranks
        return OpaqueCall(
            f"hear {name} over {ranks}", self, (), "agree", name, ranks, computes=True
        )


class SumWithErrors:
    """Callable that all-reduces a small tensor and, in the same message, exchanges errors of ops.

    Args:
        ranks: ranks over which the tensor is reduced.
        error_ranks: ranks that exchange errors, of which ``ranks`` is a subset. Those that call
            this report that each ``AgreedOp`` before it succeeded; if another rank reports an
            error, all raise it.
        op: the reduction, such as "sum".
    """

    def __init__(self, ranks: Ranks, error_ranks: Ranks, op: str) -> None:
        self.ranks, self.error_ranks, self.op = ranks, error_ranks, op

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        notes, total = current().all_reduce_with_notes(xs[0], self.ranks, self.error_ranks, self.op)
        raise_first_error(notes, self.error_ranks)
        assert total is not None
        return [total.contiguous()]

    def call(self, total: Tensor, sent: int) -> OpaqueCall:
        """Return the ``OpaqueCall`` that represents the sum in a program.

        Args:
            total: result of the sum during the recording, whose shape and dtype the call stores.
            sent: number of bytes that this rank sends.
        """
        name = f"all_reduce({self.op})"
        text = f"tell {self.error_ranks} and {name} over {self.ranks}"
        return OpaqueCall(
            text,
            self,
            (shape_of(total),),
            SUM_WITH_ERRORS,
            name,
            self.error_ranks,
            sent,
            computes=True,
        )


class _TensorPlaceholder:
    """Placeholder for each tensor in the recorded arguments of an ``AgreedOp``.

    It is printed as ``x`` in the text of the call.
    """

    def __repr__(self) -> str:
        return "x"


_TENSOR_PLACEHOLDER = _TensorPlaceholder()
