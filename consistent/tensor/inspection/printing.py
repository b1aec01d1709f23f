"""Text of a global tensor, made without communication, so that a single rank may print.

A rank that holds the whole value shows it. Any other shows its shard and says so. A rank outside
the placement has no values to show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _tensor_str

from mirrored.transports import default

from ...dispatch.plans.shards import HookOff
from ...dispatch.running.moved_views import refresh_if_local
from ...movement.world import my_coordinate
from ...spec import B, TensorSpec

_PREFIX = "tensor("


def holds_whole_value(spec: TensorSpec) -> bool:
    """Return whether this rank holds the whole value of a tensor with this spec.

    It does if it is in the placement, and each axis is B or has a single rank. Then it can print
    the value, or answer a query about it, by itself.
    """
    pairs = zip(spec.sbp, spec.placement.shape, strict=True)
    return my_coordinate(spec.placement) is not None and all(e is B or n == 1 for e, n in pairs)


def text_of(x: Any) -> str:
    """Return the text of ``repr(x)``, ``str(x)``, ``print(x)`` and ``f"{x}"`` on this rank.

    Such as ``tensor(shard of rank 0: [1., 2.], shape=(4,), placement=..., sbp=S(0))``.
    """
    spec = x._spec
    shard = _printable_shard(x)
    if shard is None:
        return (
            f"tensor({_why_not_printable(x)}, shape={tuple(spec.shape)}, "
            f"dtype={spec.dtype}{_text_suffix(x)})"
        )
    # The last character is the closing bracket.
    values = _tensor_str._str(shard)[len(_PREFIX) : -1]
    if holds_whole_value(spec):
        return f"{_PREFIX}{values}{_text_suffix(x)})"
    # Lines after the first are indented by the width of the prefix.
    gap = "\n" + " " * len(_PREFIX) if "\n" in values else " "
    return f"{_PREFIX}{_shard_label()}:{gap}{values}, shape={tuple(spec.shape)}{_text_suffix(x)})"


def format_value(x: Any, format_spec: str) -> str:
    """Implement ``f"{x:.3f}"``: return the number as text, ``0.250``.

    If this rank has only its shard of a 0-d tensor (P), that is returned with a note.
    """
    if x.ndim != 0:
        return object.__format__(x, format_spec)  # as in torch, which formats 0-d tensors only
    shard, is_whole = _printable_shard(x), holds_whole_value(x._spec)
    if not format_spec and not is_whole:
        return text_of(x)
    if shard is None:
        return f"({_why_not_printable(x)})"
    number = shard.item().__format__(format_spec)
    return number if is_whole else f"{_shard_label()}: {number}"


def _printable_shard(x: Any) -> torch.Tensor | None:
    """Return this rank's shard, detached, or None if there is nothing to print.

    That is so outside the placement. It is also so for a view that boxing had to copy
    (``moved_views``) if its base was written since: bringing it up to date would communicate.
    """
    if my_coordinate(x._spec.placement) is None:
        return None
    current = refresh_if_local(x)
    with HookOff():
        return None if current is None else torch.Tensor.detach(current)


def _why_not_printable(x: Any) -> str:
    if my_coordinate(x._spec.placement) is None:
        return f"no value on rank {default.current().rank}"
    return "a moved view whose base was written since"


def _shard_label() -> str:
    return f"shard of rank {default.current().rank}"


def _text_suffix(x: Any) -> str:
    """Return the end of the text of ``x``: placement, SBP, and ``requires_grad`` or ``grad_fn``."""
    spec = x._spec
    shown_sbp = spec.sbp[0] if len(spec.sbp) == 1 else spec.sbp
    suffix = f", placement={spec.placement}, sbp={shown_sbp}"
    node = x.grad_fn
    if node is None:
        return suffix + (", requires_grad=True" if x.requires_grad else "")
    # Ranks outside the placement hold an alias of the op's result: show the node of the op itself.
    if my_coordinate(spec.placement) is None and type(node).__name__ == "AliasBackward0":
        node = node.next_functions[0][0]
    return f"{suffix}, grad_fn=<{type(node).__name__}>"
