"""The table: op name -> row. An op without a row runs whole on every rank.

An op's name is what torch calls its function, without a trailing underscore (``add`` serves
``torch.add``, ``Tensor.add_``, ``+`` and ``torch.ops.aten.add``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..spec import EXTREMES, NdSbp, P, Sbp
from . import notation
from .signature import Call, Localize, Out, RuleFunction, Signature


@dataclass(frozen=True, slots=True)
class Row:
    """One op (or several that share the mathematics) and its rule.

    Args:
        names: space-separated op names.
        rule: the notation, or a function (call, parts) -> signatures for one axis of ``parts``
            ranks.
        params: names of the op's positional parameters, where the rule or a local form reads them.
        partial: see ``notation.signatures``.
        localize: (call, local input shapes, local output shapes) -> (args, kwargs) with sizes
            rewritten for the shard, for ops that take sizes.
        shape: (call) -> logical shapes of the outputs, or None to ask torch by a run on meta
            tensors. Rows in the notation know it from their letters.
        outs: (call) -> the outputs, where torch has no run on meta tensors or the data decides on
            shapes; None to ask torch all the same.
        composite: the op is a Python function of torch whose body reads no shape, so that it may
            run on shards as it is; other Python functions are opened and their inner ops looked up.
        by_value: the values of float arguments decide about shapes or the rule (other plans serve
            all values).
        forward: some signatures make P(max) or P(min) of other layouts, where no gradient is asked.
        moves: elements are moved, repeated or dropped and none is changed, so that what passes P
            passes P(max) and P(min) as well.
        writes: (call) -> indices of the operands that the op updates beside its result, such as
            running statistics.
    """

    names: str
    rule: str | RuleFunction
    params: str = ""
    partial: notation.Partial = None
    localize: Localize | None = None
    shape: Callable[[Call], list[tuple[int, ...]] | None] | None = None
    outs: Callable[[Call], Sequence[Out] | None] | None = None
    composite: bool = False
    by_value: bool = False
    forward: bool = False
    moves: bool = False
    writes: Callable[[Call], tuple[int, ...]] | None = None
    _params: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_params", tuple(self.params.split()))
        if isinstance(self.rule, str):
            notation.parse(self.rule)

    def signatures(self, call: Call, parts: int) -> list[Signature]:
        """Every signature that is right for ``call`` on an axis of ``parts`` ranks; the whole
        one is first."""
        call.params = self._params
        if isinstance(self.rule, str):
            shapes = tuple(tuple(operand.shape) for operand in call.operands)
            made = list(notation.signatures(self.rule, shapes, self.partial))
        else:
            made = self.rule(call, parts)
        return made + _twins(made) if self.moves else made

    def written(self, call: Call) -> tuple[int, ...]:
        """Indices of the operands that the op updates beside its result."""
        call.params = self._params
        return () if self.writes is None else self.writes(call)

    def told_outs(self, call: Call) -> tuple[Out, ...] | None:
        """The outputs, where torch cannot tell them from meta tensors."""
        call.params = self._params
        made = None if self.outs is None else self.outs(call)
        return None if made is None else tuple(made)

    def out_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        """Logical shapes of the outputs, where the rule itself says them."""
        if isinstance(self.rule, str):
            return notation.out_shapes(self.rule, [operand.shape for operand in call.operands])
        return None if self.shape is None else self.shape(call)


def _twins(made: Iterable[Signature]) -> list[Signature]:
    """The signatures from P, with P(max) and with P(min) in its place."""

    def put(kind: Sbp, entries: NdSbp) -> NdSbp:
        return tuple(kind if e is P else e for e in entries)

    return [
        Signature(put(kind, s.ins), put(kind, s.outs))
        for s in made
        if P in s.ins and s.form is None
        for kind in EXTREMES
    ]


ROWS: dict[str, Row] = {}


def add_rows(rows: Iterable[Row]) -> None:
    """Enter ``rows`` into the table; a name may stand once."""
    for row in rows:
        for name in row.names.split():
            if name in ROWS:
                raise ValueError(f'rules: "{name}" has a row already: {ROWS[name]}')
            ROWS[name] = row


def find(name: str) -> Row | None:
    """The row of an op, or None."""
    return ROWS.get(name)
