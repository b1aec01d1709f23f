"""The table: op name -> row. An op without a row runs whole on every rank.

An op's name is what torch calls its function, without a trailing underscore (``add`` serves
``torch.add``, ``Tensor.add_``, ``+`` and ``torch.ops.aten.add``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from . import notation
from .signature import Call, Localize, RuleFunction, Signature


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
        composite: the op is a Python function of torch whose body reads no shape, so that it may
            run on shards as it is; other Python functions are opened and their inner ops looked up.
        by_value: the values of float arguments decide about shapes or the rule (other plans serve
            all values).
        writes: (call) -> indices of the operands that the op updates beside its result, such as
            running statistics.
    """

    names: str
    rule: str | RuleFunction
    params: str = ""
    partial: notation.Partial = None
    localize: Localize | None = None
    shape: Callable[[Call], list[tuple[int, ...]] | None] | None = None
    composite: bool = False
    by_value: bool = False
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
            return list(notation.signatures(self.rule, shapes, self.partial))
        return self.rule(call, parts)

    def written(self, call: Call) -> tuple[int, ...]:
        """Indices of the operands that the op updates beside its result."""
        call.params = self._params
        return () if self.writes is None else self.writes(call)

    def out_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        """Logical shapes of the outputs, where the rule itself says them."""
        if isinstance(self.rule, str):
            return notation.out_shapes(self.rule, [operand.shape for operand in call.operands])
        return None if self.shape is None else self.shape(call)


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
