"""Checks that find ops which the program of a step could not store or repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirrored.transports.faults.place import user_line

from ..rules.notation.holds import is_integral
from ..spec.nested import tensors_in
from .errors import CannotRecord
from .recorded_graph import RecordedGraph

_aten = torch.ops.aten
READ_OPS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_VALUE_READERS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__bool__", "__float__", "__int__")
)
# These read the values of an argument in C++, without an op that a dispatch mode would see.
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
_PRINTABLE_TYPES = (
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
    elif not isinstance(given, _PRINTABLE_TYPES):
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
    if func in READ_OPS or torch.Tag.data_dependent_output in tags:
        raise CannotRecord(value_read_error(recorded.name, str(func)))
    depends_on_values = torch.Tag.dynamic_output_shape in tags and not _has_fixed_size(
        recorded, func, args
    )
    # Only masks among its indices make the shape of index.Tensor depend on values.
    if depends_on_values and func is _aten.index.Tensor:
        depends_on_values = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
    if depends_on_values:
        raise CannotRecord(
            f"{recorded.name}: at {user_line()}, the result of {func} has a shape that depends on "
            "values.\n  A program has one shape for each of its values.\n"
            "  Use torch.where or a mask in place of a selection, or leave that part out of "
            "the compiled step."
        )


def _has_fixed_size(recorded: RecordedGraph, func: Any, args: tuple) -> bool:
    """Return whether a result whose shape depends on values has the same shape in all runs.

    That holds for a torch op if each integer or bool operand, such as the mask in ``x[mask]``,
    was itself computed from sizes and constants only. For ops of other libraries, False.
    """
    if func.namespace != "aten":
        return False
    size_operands = [x for x in tensors_in(args) if is_integral(x.dtype)]
    return bool(size_operands) and all(
        recorded.is_fixed(recorded.node_of(x)) for x in size_operands
    )


def value_read_error(name: str, what: str) -> str:
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
        self._on_read = read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUE_READERS:
            self._on_read(args[0], func.__name__)
        elif func in _SPLITS and len(args) > 1 and isinstance(args[1], torch.Tensor):
            self._on_read(args[1], func.__name__)
        return func(*args, **(kwargs or {}))
