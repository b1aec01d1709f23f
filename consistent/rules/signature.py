"""Calls (an op as passed to rules) and SBP signatures (correct SBPs of its tensors on an axis)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..spec import B, DimCut, NdSbp, P, S, Sbp, Split, TensorSpec


class DoesNotFit(Exception):
    """Raised by rules that do not apply to a call.

    The op then runs on B operands (replicated), and every rank computes all of it.
    """


class Operand:
    """Placeholder for a tensor in the arguments of a ``Call``: its spec, without its data.

    ``index`` is its position among the call's tensors, by which signatures refer to it.
    """

    __slots__ = ("index", "spec")

    def __init__(self, index: int, spec: TensorSpec):
        self.index = index
        self.spec = spec

    @property
    def shape(self) -> torch.Size:
        """Logical shape of the tensor."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return self.spec.ndim

    def __repr__(self) -> str:
        return f"<{self.index}: {self.spec}>"


def operands_in(value: object) -> list[Operand]:
    """Return the operands in an argument ``value``, also those in nested tuples and lists.

    Example: ``[x, (y, 2)] -> [x, y]``.
    """
    if isinstance(value, Operand):
        return [value]
    if isinstance(value, tuple | list):
        return [operand for item in value for operand in operands_in(item)]
    return []


@dataclass(frozen=True, slots=True)
class Out:
    """Logical shape and dtype of one output of a call.

    Args:
        data_dependent: the first size depends on values, as that of ``nonzero``. ``shape`` then has
            the largest possible size, and the form that runs the op returns the true one.
        non_differentiable: torch computes no gradient of this output.
    """

    shape: torch.Size
    dtype: torch.dtype
    data_dependent: bool = False
    non_differentiable: bool = False

    @property
    def ndim(self) -> int:
        """Number of dims of the output."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Signature:
    """Correct combination of SBPs of an op's operands and outputs, on one placement axis.

    ``S(1), S(0) -> P`` is one of ``mm``.

    Args:
        ins: the SBP of each operand.
        outs: the SBP of each output.
        form: name of the function in ``forms/`` that computes the op on shards; None if running the
            op itself on the shards does.
        nbytes: bytes that the form itself sends per rank.
        by_size: the signature holds for the sizes of this call, and perhaps not for others. (A
            signature that is not ``by_size`` may still depend on which sizes are 1.)
    """

    ins: NdSbp
    outs: NdSbp
    form: str | None = None
    nbytes: int = 0
    by_size: bool = False

    def __repr__(self) -> str:
        text = f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"
        return f"{text} by {self.form}" if self.form else text


# Other names that torch accepts for an argument: those of numpy and of aten.
ALIASES: dict[str, tuple[str, ...]] = {
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "input": ("self", "x"),
    "other": ("x2", "tensor2"),
}


@dataclass(slots=True)
class Call:
    """Call of an op, as it is passed to rules: an ``Operand`` is in place of each tensor.

    Args:
        name: name of the op in the table of rules.
        args, kwargs: its arguments.
        operands: the operands among the arguments, in order.
        outs: shape and dtype of each output on one device.
        params: names of the positional parameters, from the op's row in the table.
        defaults: values of the parameters that a call may leave out.
        inplace: whether the op writes into its first operand.
        tracked: whether gradients are needed, which P(max) and P(min) do not have.
        axis: the placement axis for which signatures are made. It is read by rules that offer more
            for the layout that an operand has already.
        subscript: the parsed subscript in the brackets of ``x[...]``, once it has been read.
    """

    name: str
    args: tuple
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outs: tuple[Out, ...] = ()
    params: tuple[str, ...] = field(default=())
    defaults: Mapping[str, Any] = field(default_factory=dict)
    inplace: bool = False
    tracked: bool = False
    axis: int = 0
    subscript: Any = field(default=None, init=False, repr=False, compare=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument ``name``, whether passed by position or by keyword.

        If the call leaves it out, the result is ``default``, or, if that is None too, the op's
        default in the table.
        """
        return argument(self, self.args, self.kwargs, name, default)

    def dim(self, name: str = "dim", default: int | None = None, ndim: int | None = None) -> int:
        """Return the argument ``name`` as a dim of the first operand, counted from the front.

        Example: -1 gives 2 if the operand has three dims.

        Args:
            name: the argument, usually "dim".
            default: the dim if the call names none.
            ndim: number of dims to count in, if not those of the first operand.

        Raises:
            DoesNotFit: the call names no dim, so that torch chooses one, as in ``softmax(x)``.
        """
        value = self.get(name, default)
        n = self.operands[0].ndim if ndim is None else ndim
        if n and value is None:
            raise DoesNotFit
        return value % n if n else 0  # torch accepts dims 0 and -1 of a 0-d tensor

    def dims(self, name: str = "dim", default: Any = None) -> tuple[int, ...]:
        """Return the argument ``name`` as dims of the first operand, counted from the front.

        None and () mean all dims: ``sum(x)`` of a matrix gives (0, 1).
        """
        value = as_dims(self.get(name, default))
        n = self.operands[0].ndim
        return tuple(range(n)) if value is None else tuple(v % n if n else 0 for v in value)

    def require_operands(self, count: int) -> tuple[Operand, ...]:
        """Return the operands, for a rule that is for exactly ``count`` of them.

        Raises:
            DoesNotFit: there is another number of operands.
        """
        if len(self.operands) != count:
            raise DoesNotFit(f"{self.name} of {len(self.operands)} tensors, and not of {count}")
        return self.operands

    def split_and_cut(self) -> tuple[Split, DimCut] | None:
        """Return the first operand's split on ``axis`` and its cut, or None if it has no cut there.

        Rules of views use it to offer a signature for an operand that is ``S(0, cut="zigzag")``.
        None too, if an earlier axis splits the same dim.
        """
        *before, entry = self.operands[0].spec.sbp[: self.axis + 1]
        if not isinstance(entry, Split) or entry.cut is None or Split(entry.dim) in before:
            return None
        return entry, entry.cut

    def new_signature(
        self,
        ins: Mapping[int, Sbp],
        outs: Sbp | Sequence[Sbp],
        form: str | None = None,
        nbytes: int = 0,
        by_size: bool = False,
    ) -> Signature:
        """Return an SBP signature of this call, as rules make them.

        Example: ``signature({0: S(1)}, P)`` of two operands is ``S(1), B -> P``.

        Args:
            ins: SBPs by operand index; the other operands are B.
            outs: one SBP for each output, or one for all of them.
            form, nbytes, by_size: as in ``Signature``.
        """
        entries = tuple(ins.get(i, B) for i in range(len(self.operands)))
        if isinstance(outs, Sbp):
            outs = (outs,) * len(self.outs)
        return Signature(entries, tuple(outs), form, nbytes, by_size)

    def broadcast_signature(self) -> Signature:
        """Return the SBP signature with every tensor B (replicated), which is always correct.

        Every rule offers it first, so that any call can run.
        """
        return self.new_signature({}, B)

    def same_split_signatures(self, dims: Iterable[int], partial: bool = False) -> list[Signature]:
        """Return the SBP signatures that split the first operand and all outputs along one dim.

        For ``dims`` (0, 1): ``B -> B``, ``S(0) -> S(0)``, ``S(1) -> S(1)``, and ``P -> P`` if
        ``partial``. Other operands are B.
        """
        signatures = [self.broadcast_signature()] + [
            self.new_signature({0: S(d)}, S(d)) for d in dims
        ]
        if partial:
            signatures.append(self.new_signature({0: P}, P))
        return signatures


def argument(
    call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    """Return the argument ``name`` of ``call``, taken from ``args`` and ``kwargs``.

    Rules pass the call's own arguments. Forms pass the arguments of the run, which hold shards in
    place of operands. ``default`` is as for ``Call.get``.
    """
    if name in kwargs:
        return kwargs[name]
    for alias in ALIASES.get(name, ()):
        if alias in kwargs:
            return kwargs[alias]
    position = call.params.index(name)
    if position < len(args):
        return args[position]
    return call.defaults.get(name) if default is None else default


def as_dims(value: Any) -> tuple[int, ...] | None:
    """Return an argument that names dims as a tuple; None if it means all dims.

    Examples: 1 -> (1,), [0, 1] -> (0, 1), () -> None. A bool in the place of dims means something
    else, as in ``var(x, unbiased)``, and gives None.
    """
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, Sequence):
        return tuple(value) or None
    return (value,)


RuleFunction = Callable[[Call, int], list[Signature]]
LocalShapes = Sequence[tuple[int, ...]]
Localize = Callable[[Call, LocalShapes, LocalShapes], tuple[tuple, dict]]


def is_split(entry: Sbp, dim: int) -> bool:
    """Return whether ``entry`` is ``S(dim)``, with any cut."""
    return isinstance(entry, Split) and entry.dim == dim
