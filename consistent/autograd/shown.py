"""Gradients that are read during backward while addends still wait for their sum over ranks.

The reader gets a P tensor with the correct value. Nothing is communicated, as a single rank may
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
from ..dispatch.plans.shards import attach, plain, replace_shard
from ..movement.run import run
from ..spec import B, P, TensorSpec


class _ShownGradient:
    """Record of a leaf whose ``.grad`` was read while addends wait for their sum over ranks.

    ``grad`` is the tensor object that the program got, or None once the leaf was given another
    gradient. ``before_read`` is the (shard, spec) that this object had before the read, when it
    lacked the addends. ``visible`` says whether the object includes the addends at the moment.
    """

    def __init__(self, leaf: Any) -> None:
        self.leaf, self.version = leaf, -1
        self.grad: Any = None
        self.before_read: tuple[torch.Tensor, TensorSpec] | None = None
        self.visible = False
        # Watch the leaf, so that torch passes further addends to ``leaves.take_gradient`` instead
        # of adding them to the P gradient.
        self.added_watch = not _C.is_watched(leaf)
        if self.added_watch:
            _C.watch(leaf, -1, 0)

    def show(self, grad: Any, before_read: tuple[torch.Tensor, TensorSpec] | None) -> None:
        """Record that ``leaf.grad`` is now ``grad``, which includes the waiting addends.

        ``before_read`` is the (shard, spec) that this object had before; None without a gradient.
        """
        self.grad, self.version, self.before_read, self.visible = (
            grad,
            grad._version,
            before_read,
            True,
        )

    def hide(self) -> None:
        """Give the object that was read its former memory back, if it is still ``leaf.grad``."""
        if not self.visible:
            return
        self.visible = False
        if _C.held_gradient(self.leaf) is not self.grad:
            self.grad = None
            return
        if self.grad._version != self.version:
            _state.written_spec = self.leaf._spec
        if self.before_read is None:
            _C.set_gradient(self.leaf, None)
        else:
            replace_shard(self.grad, *self.before_read)

    def restore_shown(self) -> None:
        """Make the object that was read ``leaf.grad`` again, with the gradients added meanwhile.

        It is needed if there was no gradient before: ``.grad`` is then another object, made by the
        addition.
        """
        held_grad = _C.held_gradient(self.leaf)
        if self.grad is not None and self.before_read is None and held_grad is not None:
            replace_shard(self.grad, plain(held_grad), held_grad._spec)
            _C.set_gradient(self.leaf, self.grad)
            self.before_read = plain(held_grad), held_grad._spec

    def end(self) -> None:
        """Call ``restore_shown`` at the end of backward, and remove the leaf's hook if possible.

        Without the hook torch adds to the leaf's gradient again, with no call of this library.
        """
        self.restore_shown()
        held_grad = _C.held_gradient(self.leaf)
        if self.added_watch and (
            held_grad is None or held_grad._spec.sbp == self.leaf._spec.settled.sbp
        ):
            _C.unwatch(self.leaf)


class _State(threading.local):
    """The records of this thread's backward pass."""

    def __init__(self) -> None:
        self.records: list[_ShownGradient] = []
        # Spec of a leaf whose gradient a hook wrote into.
        self.written_spec: TensorSpec | None = None


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
    record = _record_of(leaf)
    if record is not None and record.visible:
        return record.grad
    addends, replaces, positions = _C.waiting_for(leaf)
    dual: TensorSpec = leaf._spec.dual.with_dtype(addends[0].dtype)
    parts = [(x, specs.get(position, dual)) for x, position in zip(addends, positions, strict=True)]
    held_grad = _C.held_gradient(leaf)
    before_read: tuple[torch.Tensor, TensorSpec] | None = None
    if held_grad is not None:
        before_read = plain(held_grad), held_grad._spec
        if not replaces:
            parts.append(before_read)
    target = _common_partial_spec([spec for _, spec in parts])
    (first, spec), *others = parts
    # A copy, since `run` may return the addend itself, which still waits for its sum.
    total = run(first, spec, target).clone()
    for x, spec in others:
        total = total + run(x, spec, target)
    if record is None:
        record = _ShownGradient(leaf)
        _state.records.append(record)
    grad = held_grad if record.grad is None else record.grad
    if grad is None:
        grad = attach(total, target)
    else:
        replace_shard(grad, total, target)
    _C.set_gradient(leaf, grad)
    record.show(grad, before_read)
    return grad


def _common_partial_spec(specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return a spec to which each of ``specs`` can be boxed without a message, to add them up.

    Any tensor is an addend of P: S pads with zeros, and of B one rank keeps the value. So the
    result is P on the axes on which ``specs`` differ: [S(0)] and [P] give P. If that would still
    send something, because several axes split one dim, it is P on all axes that are not B in all of
    them.
    """
    first, entries = specs[0], list(zip(*(spec.sbp for spec in specs), strict=True))
    target = first.with_sbp(tuple(each[0] if len(set(each)) == 1 else P for each in entries))
    if any(boxing_bytes(spec, target) for spec in specs):
        target = first.with_sbp(tuple(B if set(each) == {B} else P for each in entries))
    return target


def hide(leaf: Any) -> None:
    """Give ``leaf`` the gradient back that it had before it was read, so that addends can be added.

    A later read shows the sum again.
    """
    record = _record_of(leaf)
    if record is not None:
        record.hide()


@contextmanager
def hidden(leaf: Any) -> Iterator[None]:
    """In the context, give ``leaf`` the gradient that it had before it was read.

    When the context ends, ``leaf.grad`` is the object that was read, with what was added inside.
    """
    record = _record_of(leaf)
    if record is not None:
        record.hide()
    yield
    if record is not None:
        record.restore_shown()


def forget_record(leaf: Any) -> None:
    """Drop the record of a gradient that was read; called when ``leaf`` is given another one."""
    record = _record_of(leaf)
    if record is not None:
        record.visible, record.grad = False, None


@contextmanager
def all_hidden() -> Iterator[None]:
    """In the context, give all leaves the gradients that they had before they were read.

    At the end of backward the sums over ranks are added inside the context. When it ends, ``.grad``
    is again the object that was read, with all sums added, and the records are dropped.

    Raises:
        RuntimeError: a hook wrote into a gradient that was read.
    """
    for record in _state.records:
        record.hide()
    yield
    records, _state.records = _state.records, []
    written_spec, _state.written_spec = _state.written_spec, None
    for record in records:
        record.end()
    if written_spec is not None:
        raise _hook_write_error(written_spec)


def forget_all_records() -> None:
    """Drop all records of gradients that were read, after a backward pass that raised.

    The gradients stay as they were read.
    """
    _state.records, _state.written_spec = [], None


def _record_of(leaf: Any) -> _ShownGradient | None:
    """Return the record of ``leaf``, or None if its gradient was not read in this backward."""
    return next((each for each in _state.records if each.leaf is leaf), None)


def _hook_write_error(spec: TensorSpec) -> RuntimeError:
    return RuntimeError(
        f"backward: a hook wrote into the gradient of another leaf, {spec}, while backward was "
        "still running.\n  The gradients of leaves whose addends are summed over ranks get their "
        "sums when backward ends, and what was written is lost.\n"
        "  Write into it after backward, or in a hook of that leaf: "
        "leaf.register_post_accumulate_grad_hook(...)."
    )
