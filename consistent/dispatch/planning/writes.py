"""The operands that an op writes to, as its schema in torch says.

Besides the target of an in-place op these are running statistics, gradients that are unscaled, and
whatever a custom op declares to mutate. If such an operand is boxed for the call, the op writes to
a copy, whose new value is boxed back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...rules import table
from ...rules.signature import Call, Operand
from ...spec.nested import tensors_in


def written_operands(
    arguments: Iterable[tuple[int, str]], call: Call, row: table.Row | None
) -> frozenset[int]:
    """Return the indices of the operands of ``call`` that the op writes to.

    Args:
        arguments: (position, name) of the arguments that the op's schemas mark as written, see
            ``written_arguments``.
        call: the call, in whose arguments ``Operand`` placeholders stand for the tensors.
        row: the op's row, which may know of further writes, such as to running statistics.
    """
    indices: set[int] = {0} if call.inplace else set()
    for position, name in arguments:
        value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        indices.update(_operand_indices(value))
    if row is not None:
        indices.update(row.written(call))
    return frozenset(indices)


def _operand_indices(value: Any) -> Iterable[int]:
    """Yield the indices of the operand placeholders in ``value``, which may be a nested list."""
    if isinstance(value, Operand):
        yield value.index
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _operand_indices(item)


def written_arguments(
    function: Callable[..., Any], with_out: bool = False
) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that the schemas of ``function`` mark as written.

    Torch's own ``out=`` is left out unless ``with_out`` is True: it is always passed by name, and
    ``functions/outs.py`` handles it.
    """
    arguments: dict[tuple[int, str], None] = {}
    for schema in _schemas(function):
        for position, argument in enumerate(schema.arguments):
            if _is_written(argument) and (with_out or not argument.is_out):
                arguments[(position, argument.name)] = None
    return tuple(arguments)


# Norms that write into running statistics, though their schemas do not say so.
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats")


def written_tensors(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors among the arguments of the operator ``func`` that it writes into."""
    tensors: list[torch.Tensor] = []
    is_norm = func._schema.name.partition("::")[2].startswith(_NORMS)
    for position, argument in enumerate(func._schema.arguments):
        if _is_written(argument) or (is_norm and argument.name.startswith("running_")):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors.extend(tensors_in(value))
    return tensors


def _is_written(argument: Any) -> bool:
    """Return whether the op writes to this argument of its schema, a tensor or list of tensors.

    Some schemas mark a write to the list itself: ``aten::sort.Tensor`` is Python's ``list.sort``,
    not ``torch.sort``. These do not count.
    """
    alias = argument.alias_info
    is_list = str(argument.type).startswith("List[")
    return alias is not None and alias.is_write and not (is_list and alias.before_set)


def reshapes_in_place(function: Callable[..., Any]) -> bool:
    """Return whether torch tags ``function`` as one that may change the sizes of its target.

    Examples are ``squeeze_`` and ``t_``.
    """
    return any(torch.Tag.inplace_view in overload.tags for overload in _overloads(function))


def _schemas(function: Callable[..., Any]) -> Iterable[Any]:
    return [overload._schema for overload in _overloads(function)]


def _overloads(function: Callable[..., Any]) -> Sequence[Any]:
    if isinstance(function, torch._ops.OpOverload):
        return (function,)
    packet: Any = function
    if not isinstance(function, torch._ops.OpOverloadPacket):
        # A function or method of torch has no schema, but the aten operator of its name has.
        packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    return [getattr(packet, overload) for overload in packet.overloads()]
