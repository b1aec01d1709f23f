"""Gradients that are read during backward while addends still wait for their sum over ranks.

The reader gets a P tensor with the right value. Nothing is communicated, since one rank alone may
read it. The tensor object that was read stays ``.grad``. Before the sums are added it gets back its
former memory, so that the sums are added where torch would have added them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..boxing.plan import boxing_bytes
from ..dispatch import _C
from ..dispatch.plans.shards import attach, lay_anew, plain
from ..movement.run import run
from ..spec import B, P, TensorSpec


class _Shown:
    """Record of a leaf whose ``.grad`` was read while addends wait for their sum over ranks.

    ``grad`` is the tensor object that the program got, or None once the leaf was given another
    gradient. ``before`` is the (shard, spec) that this object had before the read, when it lacked
    the addends. ``visible`` says whether the object includes the addends at the moment.
    """

    def __init__(self, leaf: Any) -> None:
        self.leaf, self.version = leaf, -1
        self.grad: Any = None
        self.before: tuple[torch.Tensor, TensorSpec] | None = None
        self.visible = False
        # Watch the leaf, so that torch passes further addends to ``leaves.take`` instead of adding
        # them to the P gradient.
        self.watched = not _C.is_watched(leaf)
        if self.watched:
            _C.watch(leaf, -1, 0)

    def show(self, grad: Any, before: tuple[torch.Tensor, TensorSpec] | None) -> None:
        """Record that ``leaf.grad`` is now ``grad``, which includes the waiting addends.

        ``before`` is the (shard, spec) that this object had before; None if there was no gradient.
        """
        self.grad, self.version, self.before, self.visible = grad, grad._version, before, True

    def hide(self) -> None:
        """Give the object that was read its former memory back, if it is still ``leaf.grad``."""
        if not self.visible:
            return
        self.visible = False
        if _C.held_gradient(self.leaf) is not self.grad:
            self.grad = None
            return
        if self.grad._version != self.version:
            _state.written = self.leaf._spec
        if self.before is None:
            _C.set_gradient(self.leaf, None)
        else:
            lay_anew(self.grad, *self.before)

    def take(self) -> None:
        """Make the object that was read ``leaf.grad`` again, with the gradients added meanwhile.

        It is needed if there was no gradient before: ``.grad`` is then another object, made by the
        addition.
        """
        found = _C.held_gradient(self.leaf)
        if self.grad is not None and self.before is None and found is not None:
            lay_anew(self.grad, plain(found), found._spec)
            _C.set_gradient(self.leaf, self.grad)
            self.before = plain(found), found._spec

    def end(self) -> None:
        """Call ``take`` at the end of backward, and remove the hook of the leaf if possible.

        Without the hook torch adds to the leaf's gradient again, with no call of this library.
        """
        self.take()
        found = _C.held_gradient(self.leaf)
        if self.watched and (found is None or found._spec.sbp == self.leaf._spec.settled.sbp):
            _C.unwatch(self.leaf)


class _State(threading.local):
    """The records of this thread's backward pass."""

    def __init__(self) -> None:
        self.shown: list[_Shown] = []
        self.written: TensorSpec | None = None  # spec of a leaf whose gradient a hook wrote into


_state = _State()


@torch.no_grad()
def show(leaf: Any, specs: Mapping[int, TensorSpec]) -> Any:
    """Return the gradient of ``leaf`` plus the addends that wait for it, as a P tensor.

    It also becomes ``leaf.grad``, and a record is made by which ``hide`` undoes that.

    Args:
        leaf: the leaf.
        specs: position -> spec of those addends that do not have the dual spec of the leaf. A
            position is where the C++ code keeps an addend.
    """
    shown = _of(leaf)
    if shown is not None and shown.visible:
        return shown.grad
    addends, replaces, positions = _C.waiting_for(leaf)
    dual: TensorSpec = leaf._spec.dual.with_dtype(addends[0].dtype)
    parts = [(x, specs.get(at, dual)) for x, at in zip(addends, positions, strict=True)]
    held = _C.held_gradient(leaf)
    before: tuple[torch.Tensor, TensorSpec] | None = None
    if held is not None:
        before = plain(held), held._spec
        if not replaces:
            parts.append(before)
    target = _addends_of([spec for _, spec in parts])
    (first, spec), *others = parts
    # A copy, since `run` may return the addend itself, which still waits for its sum.
    total = run(first, spec, target).clone()
    for x, spec in others:
        total = total + run(x, spec, target)
    if shown is None:
        shown = _Shown(leaf)
        _state.shown.append(shown)
    grad = held if shown.grad is None else shown.grad
    if grad is None:
        grad = attach(total, target)
    else:
        lay_anew(grad, total, target)
    _C.set_gradient(leaf, grad)
    shown.show(grad, before)
    return grad


def _addends_of(specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return a spec to which each of ``specs`` can be boxed without a message, to add them up.

    Any tensor is an addend of P: S pads with zeros, and of B one rank keeps the value. So the
    result is P on the axes on which ``specs`` differ: [S(0)] and [P] give P. If that would still
    send something, because several axes split one dim, it is P on all axes that are not B in all of
    them.
    """
    first, entries = specs[0], list(zip(*(spec.sbp for spec in specs), strict=True))
    found = first.with_sbp(tuple(each[0] if len(set(each)) == 1 else P for each in entries))
    if any(boxing_bytes(spec, found) for spec in specs):
        found = first.with_sbp(tuple(B if set(each) == {B} else P for each in entries))
    return found


def hide(leaf: Any) -> None:
    """Give ``leaf`` the gradient back that it had before it was read, so that addends can be added.

    A later read shows the sum again.
    """
    shown = _of(leaf)
    if shown is not None:
        shown.hide()


@contextmanager
def hidden(leaf: Any) -> Iterator[None]:
    """In the context, give ``leaf`` the gradient that it had before it was read.

    When the context ends, ``leaf.grad`` is the object that was read, with what was added inside.
    """
    shown = _of(leaf)
    if shown is not None:
        shown.hide()
    yield
    if shown is not None:
        shown.take()


def forget(leaf: Any) -> None:
    """Drop the record of a gradient that was read; called when ``leaf`` is given another one."""
    shown = _of(leaf)
    if shown is not None:
        shown.visible, shown.grad = False, None


@contextmanager
def hidden_again() -> Iterator[None]:
    """In the context, give all leaves the gradients that they had before they were read.

    At the end of backward the sums over ranks are added inside the context. When it ends, ``.grad``
    is again the object that was read, with all sums added, and the records are dropped.

    Raises:
        RuntimeError: a hook wrote into a gradient that was read.
    """
    for each in _state.shown:
        each.hide()
    yield
    shown, _state.shown = _state.shown, []
    written, _state.written = _state.written, None
    for each in shown:
        each.end()
    if written is not None:
        raise _written(written)


def forget_shown() -> None:
    """Drop all records of gradients that were read, after a backward pass that raised.

    The gradients stay as they were read.
    """
    _state.shown, _state.written = [], None


def _of(leaf: Any) -> _Shown | None:
    """Return the record of ``leaf``, or None if its gradient was not read in this backward."""
    return next((each for each in _state.shown if each.leaf is leaf), None)


def _written(spec: TensorSpec) -> RuntimeError:
    return RuntimeError(
        f"backward: a hook wrote into the gradient of another leaf, {spec}, while backward was "
        "still running.\n  The gradients of leaves whose addends are summed over ranks get their "
        "sums when backward ends, and what was written is lost.\n"
        "  Write into it after backward, or in a hook of that leaf: "
        "leaf.register_post_accumulate_grad_hook(...)."
    )
