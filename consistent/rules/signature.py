"""Call and Signature: one op as the rules see it, and one right way to lay it out on one
placement axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..spec import B, NdSbp, P, S, Sbp, Split, TensorSpec


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


@dataclass(frozen=True, slots=True)
class Out:
    """Logical shape and dtype of one output. Of a counted one the data decides the first size:
    ``shape`` has the largest that it can be, and the form tells the true one. ``fixed``: torch
    does not differentiate it."""

    shape: torch.Size
    dtype: torch.dtype
    counted: bool = False
    fixed: bool = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Signature:
    """On one axis: SBPs of the tensor operands -> SBPs of the tensor outputs.

    ``form`` names the function in ``local/`` that computes it where running the op on the shards
    does not; ``nbytes`` is what that function itself sends per rank.
    """

    ins: NdSbp
    outs: NdSbp
    form: str | None = None
    nbytes: int = 0

    def __repr__(self) -> str:
        text = f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"
        return f"{text} by {self.form}" if self.form else text


# torch takes numpy's names for some keywords as well.
NUMPY_NAMES = {"dim": "axis", "keepdim": "keepdims", "input": "x", "other": "x2"}


@dataclass(slots=True)
class Call:
    """One op call with an ``Operand`` in place of each tensor, and its logical outputs."""

    name: str
    args: tuple
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outs: tuple[Out, ...] = ()
    params: tuple[str, ...] = field(default=())
    inplace: bool = False
    tracked: bool = False  # whether gradients are asked for, which P(max) and P(min) have not
    axis: int = (
        0  # the placement axis that signatures are asked for; only regrouped dims depend on it
    )
    index: Any = field(default=None, init=False, repr=False, compare=False)  # read once, `indexing`

    def get(self, name: str, default: Any = None) -> Any:
        """The argument called ``name``, given by position or by keyword."""
        for known in (name, NUMPY_NAMES.get(name, name)):
            if known in self.kwargs:
                return self.kwargs[known]
        position = self.params.index(name)
        return self.args[position] if position < len(self.args) else default

    def dim(self, name: str = "dim", default: int | None = None, ndim: int | None = None) -> int:
        """The argument ``name`` as a dim counted from the front of the first operand."""
        value = self.get(name, default)
        n = self.operands[0].ndim if ndim is None else ndim
        return value % n if n else 0

    def dims(self, name: str = "dim", default: Any = None) -> tuple[int, ...]:
        """The argument ``name`` as dims of the first operand; None and () mean all of them."""
        value = self.get(name, default)
        n = self.operands[0].ndim
        if value is None or (isinstance(value, Sequence) and len(value) == 0):
            return tuple(range(n))
        values = value if isinstance(value, Sequence) else (value,)
        return tuple(v % n if n else 0 for v in values)

    def make(
        self,
        ins: Mapping[int, Sbp],
        outs: Sbp | Sequence[Sbp],
        form: str | None = None,
        nbytes: int = 0,
    ) -> Signature:
        """A signature with ``ins`` by operand index (B elsewhere); one SBP for ``outs`` serves
        all outputs."""
        entries = tuple(ins.get(i, B) for i in range(len(self.operands)))
        if isinstance(outs, Sbp):
            outs = (outs,) * len(self.outs)
        return Signature(entries, tuple(outs), form, nbytes)

    def whole(self) -> Signature:
        """Every tensor B: always right."""
        return self.make({}, B)

    def same(self, dims: Iterable[int], partial: bool = False) -> list[Signature]:
        """First operand and every output split along the same ``dims`` (others B), or all P if
        ``partial``."""
        made = [self.whole()] + [self.make({0: S(d)}, S(d)) for d in dims]
        if partial:
            made.append(self.make({0: P}, P))
        return made


RuleFunction = Callable[[Call, int], list[Signature]]
LocalShapes = Sequence[tuple[int, ...]]
Localize = Callable[[Call, LocalShapes, LocalShapes], tuple[tuple, dict]]


def is_split(entry: Sbp, dim: int) -> bool:
    """Whether ``entry`` is ``S(dim)``."""
    return isinstance(entry, Split) and entry.dim == dim
