"""Table of the rules of all ops, by name. Ops without a row run on gathered inputs on each rank.

An op's name is what torch calls its function, without a trailing underscore (``add`` serves
``torch.add``, ``Tensor.add_``, ``+`` and ``torch.ops.aten.add``).
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..spec import NdSbp
from . import notation
from .signature import (
    ALIASES,
    Call,
    DoesNotFit,
    Localize,
    Operand,
    Out,
    RuleFunction,
    Signature,
    operands_in,
)

_CANONICAL_NAMES = {alias: name for name, aliases in ALIASES.items() for alias in aliases}


class Sizing(enum.IntEnum):
    """Computation of the local sizes among an op's arguments, for ops that take sizes.

    ``x.view(8, 4)`` of a tensor split in two must run as ``view(4, 4)`` on the shard. With a
    ``Sizing`` one cached plan serves calls of all sizes: csrc/bindings/dispatch/lookup/sizes.h
    computes them.
    """

    VIEW = 1
    EXPAND = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Rule of one op, or of several ops with the same mathematics.

    Args:
        names: space-separated op names.
        rule: the notation ("mk, kn -> mn"); or several rules, of which the first that fits a call
            is taken; or a function (call, parts) -> signatures for one axis of ``parts`` ranks.
        params: names of the op's positional parameters, if the rule or a form reads them, with the
            defaults of optional ones: "input dim=-1".
        along: the argument that names the dims of the rule's capital letters, or a function of the
            call.
        extremes: (call) -> signatures for P(max) and P(min) in addition to those of the rule.
        localize: (call, local input shapes, local output shapes) -> (args, kwargs) with sizes
            rewritten for the shard, for ops that take sizes, such as view.
        outs: (call) -> the outputs, if torch has no meta kernel or shapes depend on data; None
            leaves them to torch after all.
        composite: the op is a Python function of torch whose body reads no shape, so that it may
            run on shards as it is. Other Python functions are decomposed: their body runs on
            global tensors, and the rows of the ops in it are used.
        by_value: the values of float arguments affect shapes or the rule; without this flag one
            cached plan serves all values.
        makes_extremes: some signatures make P(max) or P(min) from other layouts, if no gradient is
            needed.
        moves: elements are moved, repeated or dropped and none is changed, so that signatures that
            pass P pass P(max) and P(min) as well. Rules in the notation say so themselves.
        numbers: names of parameters whose integers do not affect layouts (a factor, an offset along
            a dim that is whole), or "*" for all of them. For an elementwise rule in the notation it
            is "*".
        any_size: for a rule that is a function: its signatures do not depend on sizes, except for
            which of them are 0 or 1; or a function (call, layouts of the operands) that decides
            this for one call. Signatures of a rule in the notation do not depend on sizes unless
            they are ``by_size``.
        sizing: which computation gives the local sizes among the arguments for any sizes, see
            csrc/bindings/dispatch/lookup/sizes.h.
        writes: (call) -> indices of the operands that the op updates in addition to its result,
            such as running statistics.
    """

    names: str
    rule: str | tuple[str, ...] | RuleFunction
    params: str = ""
    along: notation.Along = "dim"
    extremes: Callable[[Call], list[Signature]] | None = None
    localize: Localize | None = None
    outs: Callable[[Call], Sequence[Out] | None] | None = None
    composite: bool = False
    by_value: bool = False
    makes_extremes: bool = False
    moves: bool = False
    numbers: str = ""
    any_size: bool | Callable[[Call, Sequence[NdSbp]], bool] = False
    sizing: Sizing | None = None
    writes: Callable[[Call], tuple[int, ...]] | None = None
    rules: tuple[notation.Rule, ...] = field(default=(), repr=False)
    _params: tuple[str, ...] = field(default=(), repr=False)
    _defaults: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        pairs = [entry.partition("=") for entry in self.params.split()]
        defaults = {name: ast.literal_eval(value) for name, sign, value in pairs if sign}
        # The dataclass is frozen: derived fields are set past it.
        object.__setattr__(self, "_params", tuple(name for name, _, _ in pairs))
        object.__setattr__(self, "_defaults", defaults)
        if not callable(self.rule):
            texts = (self.rule,) if isinstance(self.rule, str) else self.rule
            object.__setattr__(self, "rules", tuple(map(notation.parse, texts)))
            object.__setattr__(
                self, "makes_extremes", self.makes_extremes or _makes_extremes(self.rules)
            )
            if self.is_elementwise:
                object.__setattr__(self, "numbers", "*")

    @property
    def is_notation(self) -> bool:
        """True if the rule is written in the notation, such as "mk, kn -> mn"."""
        return bool(self.rules)

    @property
    def is_elementwise(self) -> bool:
        """True if the rule is written in the notation and says that the op is elementwise."""
        return self.is_notation and all(rule.is_elementwise for rule in self.rules)

    def signatures(self, call: Call, parts: int) -> list[Signature]:
        """Return every SBP signature that holds for ``call`` on an axis of ``parts`` ranks.

        The one in which every tensor is B comes first.

        Raises:
            DoesNotFit: the row's rule does not apply to such a call.
        """
        self._name_arguments(call)
        if not _has_operands_in_order(call):
            raise DoesNotFit(
                f"{self.names.split()[0]}: tensors named in another order than torch's"
            )
        if callable(self.rule):
            signatures = self.rule(call, parts)
            return signatures + notation.extreme_variants(signatures) if self.moves else signatures
        signatures = notation.signatures_of(self.rules, call, parts, self.along)
        return signatures if self.extremes is None else signatures + self.extremes(call)

    def position(self, name: str) -> int:
        """Return the position of the parameter ``name`` among the op's positional parameters."""
        return self._params.index(name)

    def serves_any_size(self, call: Call, ins: Sequence[NdSbp]) -> bool:
        """Return whether the signature of ``call`` for operand SBPs ``ins`` holds for all sizes.

        If it does, the plan of this call is reused for calls that differ only in sizes. (Which
        sizes are 0 or 1 may always matter.)
        """
        if self.is_notation:
            return True
        return self.any_size if isinstance(self.any_size, bool) else self.any_size(call, ins)

    def written(self, call: Call) -> tuple[int, ...]:
        """Return the indices of the operands that the op updates in addition to its result.

        For batch_norm in training they are those of the running mean and variance.
        """
        self._name_arguments(call)
        return () if self.writes is None else self.writes(call)

    def known_outs(self, call: Call) -> tuple[Out, ...] | None:
        """Return shape and dtype of the outputs of ``call`` if the row has a function for them.

        None leaves them to torch, which then runs the op on meta tensors.
        """
        self._name_arguments(call)
        try:
            outs = None if self.outs is None else self.outs(_with_operands_in_order(call))
        except DoesNotFit:
            return None
        return None if outs is None else tuple(outs)

    def _name_arguments(self, call: Call) -> None:
        """Set the names and defaults of the op's parameters in ``call``, for ``call.get``."""
        call.params, call.defaults = self._params, self._defaults


def _has_operands_in_order(call: Call) -> bool:
    """Return whether tensors passed by keyword are in the order of the op's parameters.

    Rules and forms count operands in the order of the parameters: ``mm(mat2=b, input=a)`` does not
    fit.
    """
    names = [name for name, value in call.kwargs.items() if operands_in(value)]
    if not names:
        return True
    canonical_names = [_CANONICAL_NAMES.get(name, name) for name in names]
    # Without positional tensors the first keyword must be the first parameter, unless a list of
    # tensors comes before it.
    if not any(isinstance(value, Operand) for value in call.args) and call.params:
        if canonical_names[0] != _CANONICAL_NAMES.get(call.params[0], call.params[0]):
            return isinstance(call.args[0] if call.args else None, list | tuple)
    positions = [call.params.index(name) for name in canonical_names if name in call.params]
    return positions == sorted(positions)


def _with_operands_in_order(call: Call) -> Call:
    """Return ``call`` with its tensors in the order of the parameters, to compute its outputs.

    Only the outputs may be computed from it. Signatures refer to operands by their order in the
    call as it was made.
    """
    if _has_operands_in_order(call):
        return call
    last = len(call.params)
    positions = {name: position for position, name in enumerate(call.params)}
    names = sorted(
        call.kwargs, key=lambda name: positions.get(_CANONICAL_NAMES.get(name, name), last)
    )
    by_name = {name: call.kwargs[name] for name in names}
    operands = operands_in((call.args, *by_name.values()))
    return replace(call, kwargs=by_name, operands=tuple(operands))


def _makes_extremes(rules: Iterable[notation.Rule]) -> bool:
    """Return whether a rule makes P(max) or P(min) from a split dim that is reduced.

    ``max(...D) -> ...`` does: each rank has the maximum of its shard.
    """
    return any(
        head in ("max", "min") and any(name not in out_names for name in pattern.names)
        for rule in rules
        for out_names in [{name for out in rule.outs for p in out.patterns for name in p.names}]
        for _, head, pattern in rule.operands
    )


ROWS: dict[str, Row] = {}


def add_rows(rows: Iterable[Row]) -> None:
    """Add ``rows`` to the table.

    Raises:
        ValueError: an op name occurs twice.
    """
    for row in rows:
        for name in row.names.split():
            if name in ROWS:
                raise ValueError(f'rules: "{name}" has a row already: {ROWS[name]}')
            ROWS[name] = row


def find_row(name: str) -> Row | None:
    """Return the row of the op ``name``, or None: such an op runs on B operands on every rank."""
    return ROWS.get(name)
