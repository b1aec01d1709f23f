"""Gradients of leaves that are read while backward runs and their addends still wait for the sum.

``.grad`` is then a P tensor with the right value, and nothing is communicated, since one rank alone
may read it. The object that was read stays the gradient. Before the sums are added it gets back the
memory that it had, so that the sums arrive where torch would have put them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..dispatch import _C
from ..dispatch.plans.shards import attach, lay_anew, plain
from ..movement.run import run
from ..spec import P, TensorSpec


class _Shown:
    """A leaf, the object that is its gradient, and the (shard, spec) of that object before it was
    read."""

    __slots__ = ("leaf", "grad", "before", "version", "visible", "watched")

    def __init__(self, leaf: Any, grad: Any, before: tuple[torch.Tensor, TensorSpec] | None):
        self.leaf, self.grad, self.before = leaf, grad, before
        self.version = grad._version
        self.visible = True
        # What torch would add to a P gradient comes to ``leaves.take`` instead.
        self.watched = not _C.is_watched(leaf)
        if self.watched:
            _C.watch(leaf, -1, 0)


class _State(threading.local):
    def __init__(self) -> None:
        self.shown: list[_Shown] = []
        self.specs: dict[int, TensorSpec] = {}  # of addends, by their positions
        self.written: TensorSpec | None = None  # that of a gradient which a hook wrote into


_state = _State()


def note_spec(position: int, spec: TensorSpec) -> None:
    """The addend that waits at ``position`` has another layout than the dual of its leaf's."""
    _state.specs[position] = spec


@torch.no_grad()
def show(leaf: Any) -> Any:
    """The gradient of a leaf together with the addends that wait for it, as P."""
    shown = _of(leaf)
    if shown is not None and shown.visible:
        return shown.grad
    addends, replaces, positions = _C.waiting_for(leaf)
    dual: TensorSpec = leaf._spec.dual.with_dtype(addends[0].dtype)
    specs = [_state.specs[at] if at in _state.specs else dual for at in positions]
    parts = list(zip(addends, specs, strict=True))
    held = _C.held_gradient(leaf)
    before: tuple[torch.Tensor, TensorSpec] | None = None
    if held is not None:
        before = plain(held), held._spec
        parts += () if replaces else (before,)
    target = _addends_of([spec for _, spec in parts])
    (first, spec), *others = parts
    total = run(first, spec, target).clone()
    for x, spec in others:
        total = total + run(x, spec, target)
    if shown is not None:
        held = shown.grad  # the object that was read before
        _state.shown.remove(shown)
    if held is None:
        held = attach(total, target)
    else:
        lay_anew(held, total, target)
    _C.set_gradient(leaf, held)
    _state.shown.append(_Shown(leaf, held, before))
    return held


def _addends_of(specs: Sequence[TensorSpec]) -> TensorSpec:
    """P on the axes on which ``specs`` differ: what each of them becomes without a message."""
    first = specs[0]
    entries = zip(*(spec.sbp for spec in specs), strict=True)
    return first.with_sbp(tuple(each[0] if len(set(each)) == 1 else P for each in entries))


def is_shown(leaf: Any) -> bool:
    """Whether the gradient of ``leaf`` is one with addends that still wait."""
    shown = _of(leaf)
    return shown is not None and shown.visible


def hide(leaf: Any) -> None:
    """Let ``leaf`` have the gradient that it had before it was read. It is shown again when it is
    read again."""
    shown = _of(leaf)
    if shown is not None:
        _hide(shown)


def _hide(shown: _Shown) -> None:
    if not shown.visible:
        return
    shown.visible = False
    if shown.watched:
        _C.unwatch(shown.leaf)
    if _C.held_gradient(shown.leaf) is not shown.grad:
        _state.shown.remove(shown)
        return
    if shown.grad._version != shown.version:
        _state.written = shown.leaf._spec
    if shown.before is None:
        _C.set_gradient(shown.leaf, None)
    else:
        lay_anew(shown.grad, *shown.before)


def forget(leaf: Any) -> None:
    """``leaf`` has been given another gradient."""
    shown = _of(leaf)
    if shown is not None:
        _state.shown.remove(shown)
        if shown.visible and shown.watched:
            _C.unwatch(leaf)


@contextmanager
def hidden_again() -> Iterator[None]:
    """Inside, leaves have the gradients that they had before they were read; after it, the objects
    that were read are their gradients again."""
    for each in tuple(_state.shown):
        _hide(each)
    yield
    shown, _state.shown = _state.shown, []
    written, _state.written = _state.written, None
    _state.specs.clear()
    for each in shown:
        found = _C.held_gradient(each.leaf)
        if each.before is None and found is not None:
            lay_anew(each.grad, plain(found), found._spec)
            _C.set_gradient(each.leaf, each.grad)
    if written is not None:
        raise _written(written)


def forget_shown() -> None:
    """Called after a backward that raised: gradients stay as they were read."""
    _state.shown, _state.written = [], None
    _state.specs.clear()


def _of(leaf: Any) -> _Shown | None:
    return next((each for each in _state.shown if each.leaf is leaf), None)


def _written(spec: TensorSpec) -> RuntimeError:
    return RuntimeError(
        f"backward: a hook wrote into the gradient of another leaf, {spec}, while backward was "
        "still running.\n  The gradients of leaves whose addends are summed over ranks get their "
        "sums when backward ends, and what was written is lost.\n"
        "  Write into it after backward, or in a hook of that leaf: "
        "leaf.register_post_accumulate_grad_hook(...)."
    )
