"""Call and Signature: one op as the rules see it, and one correct combination of SBPs for it on one
placement axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..spec import B, Cut, NdSbp, P, S, Sbp, Split, TensorSpec


class DoesNotFit(Exception):
    """A row's rule does not apply to this call, which then runs whole on every rank."""


class Operand:
    """Stands where a tensor stood among an op's arguments; ``index`` counts tensors in order."""

    __slots__ = ("index", "spec")

    def __init__(self, index: int, spec: TensorSpec):
        self.index = index
        self.spec = spec

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.spec.ndim

    def __repr__(self) -> str:
        return f"<{self.index}: {self.spec}>"


def operands_in(value: object) -> list[Operand]:
    """The operands in ``value``, those in tuples and lists too."""
    if isinstance(value, Operand):
        return [value]
    if isinstance(value, tuple | list):
        return [operand for item in value for operand in operands_in(item)]
    return []


@dataclass(frozen=True, slots=True)
class Out:
    """Logical shape and dtype of one output.

    For a ``data_dependent`` output the data decides the first size: ``shape`` has the largest
    possible one, and the form returns the true one. Torch has no gradient of a ``fixed`` output.
    """

    shape: torch.Size
    dtype: torch.dtype
    data_dependent: bool = False
    fixed: bool = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Signature:
    """On one axis: SBPs of the tensor operands -> SBPs of the tensor outputs.

    ``form`` names the function in ``forms/`` that computes it where running the op on the shards
    does not; ``nbytes`` is what that function itself sends per rank. ``by_size`` says that it
    holds for these sizes and perhaps not for others of the same pattern of ones.
    """

    ins: NdSbp
    outs: NdSbp
    form: str | None = None
    nbytes: int = 0
    by_size: bool = False

    def __repr__(self) -> str:
        text = f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"
        return f"{text} by {self.form}" if self.form else text


# Other names that torch has for an argument: numpy's, and those of aten.
ALIASES: dict[str, tuple[str, ...]] = {
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "input": ("self", "x"),
    "other": ("x2", "tensor2"),
}


@dataclass(slots=True)
class Call:
    """One op call with an ``Operand`` in place of each tensor, and its logical outputs.

    Args:
        params: names of the positional parameters, from the row.
        defaults: values of those that a call may leave out.
        tracked: whether gradients are asked for, which P(max) and P(min) do not have.
        axis: the placement axis that signatures are asked for; only regrouped dims depend on it.
        subscript: the subscript in the brackets of ``x[...]``, once it has been read.
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
        """The argument called ``name``, given by position or by keyword; else ``default``, else
        the row's default."""
        return argument(self, self.args, self.kwargs, name, default)

    def dim(self, name: str = "dim", default: int | None = None, ndim: int | None = None) -> int:
        """The argument ``name`` as a dim counted from the front of the first operand."""
        value = self.get(name, default)
        n = self.operands[0].ndim if ndim is None else ndim
        if n and value is None:
            raise DoesNotFit  # torch chooses a dim: softmax(x)
        return value % n if n else 0

    def dims(self, name: str = "dim", default: Any = None) -> tuple[int, ...]:
        """The argument ``name`` as dims of the first operand; None and () mean all of them."""
        value = dims_given(self.get(name, default))
        n = self.operands[0].ndim
        return tuple(range(n)) if value is None else tuple(v % n if n else 0 for v in value)

    def take(self, count: int) -> tuple[Operand, ...]:
        """The operands, if there are ``count`` of them.

        Raises:
            DoesNotFit: there are not.
        """
        if len(self.operands) != count:
            raise DoesNotFit(f"{self.name} of {len(self.operands)} tensors, and not of {count}")
        return self.operands

    def cut_split(self) -> tuple[Split, Cut] | None:
        """The split of the first operand on the axis, and how it cuts the dim; None where pieces
        are balanced, and where it cuts pieces of the dim and not the dim itself."""
        *before, entry = self.operands[0].spec.sbp[: self.axis + 1]
        if not isinstance(entry, Split) or entry.cut is None or Split(entry.dim) in before:
            return None
        return entry, entry.cut

    def make(
        self,
        ins: Mapping[int, Sbp],
        outs: Sbp | Sequence[Sbp],
        form: str | None = None,
        nbytes: int = 0,
        by_size: bool = False,
    ) -> Signature:
        """A signature with ``ins`` by operand index (B elsewhere); one SBP for ``outs`` serves
        all outputs."""
        entries = tuple(ins.get(i, B) for i in range(len(self.operands)))
        if isinstance(outs, Sbp):
            outs = (outs,) * len(self.outs)
        return Signature(entries, tuple(outs), form, nbytes, by_size)

    def whole(self) -> Signature:
        """Every tensor B: always correct."""
        return self.make({}, B)

    def same(self, dims: Iterable[int], partial: bool = False) -> list[Signature]:
        """First operand and every output split along the same ``dims`` (others B), or all P if
        ``partial``."""
        made = [self.whole()] + [self.make({0: S(d)}, S(d)) for d in dims]
        if partial:
            made.append(self.make({0: P}, P))
        return made


def argument(
    call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    """The argument of ``call`` named ``name``, from ``args`` and ``kwargs``, which may hold
    shards."""
    if name in kwargs:
        return kwargs[name]
    for alias in ALIASES.get(name, ()):
        if alias in kwargs:
            return kwargs[alias]
    position = call.params.index(name)
    if position < len(args):
        return args[position]
    return call.defaults.get(name) if default is None else default


def dims_given(value: Any) -> tuple[int, ...] | None:
    """An argument that names dims, as a tuple; None where it means all of them. ``True`` in the
    place of a dim says something else (``var(x, unbiased)``)."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, Sequence):
        return tuple(value) or None
    return (value,)


RuleFunction = Callable[[Call, int], list[Signature]]
LocalShapes = Sequence[tuple[int, ...]]
Localize = Callable[[Call, LocalShapes, LocalShapes], tuple[tuple, dict]]


def is_split(entry: Sbp, dim: int) -> bool:
    """Whether ``entry`` is ``S(dim)``."""
    return isinstance(entry, Split) and entry.dim == dim
