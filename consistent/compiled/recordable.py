"""Checks that find ops which the program of a step could not store or repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirrored.transports.faults.place import user_line

from ..graph.reads import are_whole
from ..spec.nested import tensors_in
from .errors import CannotRecord
from .recorded_graph import RecordedGraph

_aten = torch.ops.aten
READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_TO_PYTHON = frozenset(
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__bool__", "__float__", "__int__")
)
# These read the values of an argument in C++, without an op that a dispatch mode would see.
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
_PRINTED = (
    int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Tensor, slice,
)  # fmt: skip


def check_printable(name: str, func: Any, given: Any) -> None:
    """Raise if an argument of the op ``func`` has no text form.

    A program is kept as text, so it cannot hold such an argument, like a process group or a
    generator.

    Args:
        name: name of the step in messages.
        func: the op.
        given: its arguments, or one of them.

    Raises:
        CannotRecord: there is such an argument.
    """
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for x in given:
            check_printable(name, func, x)
    elif not isinstance(given, _PRINTED):
        raise CannotRecord(
            f"{name}: at {user_line()}, {func} is given a {type(given).__name__}, which a program "
            "cannot hold.\n  Use collectives of torch.distributed and generators of your own "
            "outside a compiled step."
        )


def check_values(recorded: RecordedGraph, func: Any, args: tuple) -> None:
    """Raise if the op ``func`` returns a value to Python, or if values decide its result's shape.

    Raises:
        CannotRecord: it does, and the values are not the same in all calls of the step.
    """
    tags = func.tags
    if func in READS or torch.Tag.data_dependent_output in tags:
        raise CannotRecord(reads_value(recorded.name, str(func)))
    by_value = torch.Tag.dynamic_output_shape in tags and not _sized_by_fixed(recorded, func, args)
    # Only masks among its indices make the shape of index.Tensor depend on values.
    if by_value and func is _aten.index.Tensor:
        by_value = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
    if by_value:
        raise CannotRecord(
            f"{recorded.name}: at {user_line()}, the result of {func} has a shape that depends on "
            "values.\n  A program has one shape for each of its values.\n"
            "  Use torch.where or a mask in place of a selection, or leave that part out of "
            "the compiled step."
        )


def _sized_by_fixed(recorded: RecordedGraph, func: Any, args: tuple) -> bool:
    """Return whether a result whose shape depends on values has the same shape in all runs.

    That holds for a torch op if each integer or bool operand, such as the mask in ``x[mask]``,
    was itself computed from sizes and constants only. For ops of other libraries, False.
    """
    if func.namespace != "aten":
        return False
    deciding = [x for x in tensors_in(args) if are_whole(x.dtype)]
    return bool(deciding) and all(recorded.is_fixed(recorded.node_of(x)) for x in deciding)


def reads_value(name: str, what: str) -> str:
    """Return the error text for ``what``, an op or method by which Python reads a tensor's value.

    ``name`` is the name of the step.
    """
    return (
        f"{name}: at {user_line()}, {what} reads a value that the step computes.\n"
        "  What Python does with it would be done with the values of one step only.\n"
        "  Return it from the step and read it outside, or use torch.where in place of `if`."
    )


class PythonReads(TorchFunctionMode):
    """Torch function mode that detects when Python reads values of plain tensors without an op.

    ``x.tolist()`` is an example.

    Args:
        read: called with the tensor and the name of the function, before it runs.
    """

    def __init__(self, read: Callable[[torch.Tensor, str], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TO_PYTHON:
            self._read(args[0], func.__name__)
        elif func in _SPLITS and len(args) > 1 and isinstance(args[1], torch.Tensor):
            self._read(args[1], func.__name__)
        return func(*args, **(kwargs or {}))
