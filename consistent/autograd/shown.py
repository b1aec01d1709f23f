"""Gradients of leaves that are read while backward runs and their addends still wait for the sum.

``.grad`` is then a P tensor with the right value, and nothing is communicated, since one rank alone
may read it. The object that was read stays the gradient. Before the sums are added it gets back the
memory that it had, so that the sums arrive where torch would have put them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..dispatch import _C
from ..dispatch.plans.shards import attach, lay_anew, plain
from ..movement.run import run
from ..spec import TensorSpec


class _Shown:
    """A leaf, the object that is its gradient, and the (shard, spec) of that object before it was
    read."""

    __slots__ = ("leaf", "grad", "before", "version")

    def __init__(self, leaf: Any, grad: Any, before: tuple[torch.Tensor, TensorSpec] | None):
        self.leaf, self.grad, self.before = leaf, grad, before
        self.version = grad._version


class _State(threading.local):
    def __init__(self) -> None:
        self.shown: list[_Shown] = []


_state = _State()


@torch.no_grad()
def show(leaf: Any) -> Any:
    """The gradient of a leaf together with the addends that wait for it, as P."""
    for each in _state.shown:
        if each.leaf is leaf:
            return each.grad
    addends, replaces = _C.waiting_for(leaf)
    dual = leaf._spec.dual.with_dtype(addends[0].dtype)
    held = _C.held_gradient(leaf)
    before = None if held is None else (plain(held), held._spec)
    total = sum(addends[1:], addends[0].clone())
    if before is not None and not replaces:
        total = total + run(before[0], before[1], dual)
    if held is None:
        held = attach(total, dual)
        _C.set_gradient(leaf, held)
    else:
        lay_anew(held, total, dual)
    _state.shown.append(_Shown(leaf, held, before))
    return held


@contextmanager
def hidden_again() -> Iterator[None]:
    """Inside, leaves have the gradients that they had before they were read; after it, the objects
    that were read are their gradients again."""
    shown, _state.shown = _state.shown, []
    shown = [each for each in shown if _C.held_gradient(each.leaf) is each.grad]
    written = next((each for each in shown if each.grad._version != each.version), None)
    for each in shown:
        if each.before is None:
            _C.set_gradient(each.leaf, None)
        else:
            lay_anew(each.grad, *each.before)
    yield
    for each in shown:
        found = _C.held_gradient(each.leaf)
        if each.before is None and found is not None:
            lay_anew(each.grad, plain(found), found._spec)
            _C.set_gradient(each.leaf, each.grad)
    if written is not None:
        raise _written(written.leaf._spec)


def forget_shown() -> None:
    """Called after a backward that raised: gradients stay as they were read."""
    _state.shown = []


def _written(spec: TensorSpec) -> RuntimeError:
    return RuntimeError(
        f"backward: a hook wrote into the gradient of another leaf, {spec}, while backward was "
        "still running.\n  The gradients of leaves that several ranks hold are summed when "
        "backward ends, and what was written is lost.\n"
        "  Write into it after backward, or in a hook of that leaf: "
        "leaf.register_post_accumulate_grad_hook(...)."
    )
