"""A call taken apart: its tensors, its row, its logical outputs, and what the row claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from consistent.dispatch.planning.functions.torch_functions import TorchFunction, resolve
from consistent.rules import Call, Operand, Out, Row, Signature, find_row
from consistent.spec import B, Placement, TensorSpec, fits_dtype
from tests.reference import Tensors

Grid = int | tuple[int, ...]
_ALONE = (torch.Tensor, bool, int, float, str, torch.dtype, NoneType)


class Called:
    """``func(*args, **kwargs)`` on a placement of ``ranks``."""

    def __init__(
        self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], ranks: Grid
    ) -> None:
        self.known: TorchFunction = resolve(func)
        assert self.known.kind == "op", (
            f"{self.known.name} is a Python function: give the builtin in it"
        )
        row = find_row(self.known.name)
        assert row is not None, f"{self.known.name} has no row"
        self.row: Row = row
        self.args, self.kwargs = args, kwargs
        self.tensors = tensors_in((args, list(kwargs.values())))
        self._place(ranks)
        self.call.outs = self._logical_outputs()
        self.data_dependent = any(out.data_dependent for out in self.call.outs)

    def __repr__(self) -> str:
        name = f"{self.known.name}{'_' if self.known.inplace else ''}"
        return name + shown(self.args, self.kwargs)

    def _place(self, ranks: Grid) -> None:
        """Take the call to a placement of ``ranks``, with every operand whole on each."""
        self.shape = (ranks,) if isinstance(ranks, int) else ranks
        numbers = torch.arange(torch.Size(self.shape).numel()).view(self.shape).numpy()
        self.placement = Placement("cpu", numbers)
        operands = tuple(
            Operand(i, TensorSpec.of(self.placement, (B,) * len(self.shape), t.shape, t.dtype))
            for i, t in enumerate(self.tensors)
        )
        self.call = Call(self.known.name, *replaced(self.args, self.kwargs, operands), operands)
        self.call.inplace = self.known.inplace

    def run(self, shards: Sequence[Any]) -> Any:
        """The op with `shards` in place of its tensors."""
        args, kwargs = replaced(self.args, self.kwargs, shards)
        return self.known.run(*args, **kwargs)

    def results(self, result: Any, given: Tensors) -> Tensors:
        """The tensors in a result; an in-place op's is the first it was given (`x[i] = v`
        returns None)."""
        return given[:1] if self.known.inplace else tensors_in(result)

    def signatures(self, axis: int) -> list[Signature]:
        """What the row claims on `axis`, as dispatch takes it."""
        self.call.axis = axis
        options = self.row.signatures(self.call, self.shape[axis])
        dtypes = [o.spec.dtype for o in self.call.operands] + [o.dtype for o in self.call.outs]
        options = [s for s in options if all(map(fits_dtype, s.ins + s.outs, dtypes))]
        if self.known.inplace:
            options = [s for s in options if s.ins[0] is s.outs[0]]
        return list(dict.fromkeys(options))

    def _logical_outputs(self) -> tuple[Out, ...]:
        known = self.row.known_outs(self.call)
        if known is not None:
            return known
        metas = [torch.empty_like(t, device="meta") for t in self.tensors]
        with torch.no_grad():
            found = self.results(self.run(metas), metas)
        assert found, f"{self}: no tensor comes out"
        return tuple(Out(t.shape, t.dtype) for t in found)


def tensors_in(value: Any) -> Tensors:
    """All tensors in ``value``, in order."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def replaced(
    args: tuple, kwargs: dict[str, Any], by: Sequence[Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with `by` in place of their tensors, positional ones first."""
    source = iter(by)

    def one(x: Any) -> Any:
        return next(source) if isinstance(x, torch.Tensor) else x

    def each(x: Any) -> Any:  # most arguments hold no others
        return one(x) if isinstance(x, _ALONE) else tree_map(one, x)

    new_args = tuple(map(each, args))
    return new_args, {name: each(value) for name, value in kwargs.items()}


def shown(args: tuple, kwargs: dict[str, Any]) -> str:
    """Arguments as a call is written, tensors as dtype and shape."""

    def one(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, tuple | list):
            return f"[{', '.join(map(one, x))}]"
        return repr(x)

    parts = [one(a) for a in args] + [f"{name}={one(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"
