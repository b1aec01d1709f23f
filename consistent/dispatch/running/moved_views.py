"""Moved views: results of view ops for which boxing had to move the data.

On one device a view shares storage with its source. A moved view is a copy that remembers its
source. If the source was written since, the view is taken from it again before it is read. What is
written into the view is written into the source.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.base.unseen import hidden_from_modes

from ...movement.grad_mode import is_recording, records
from ...movement.world import my_coordinate
from ...spec import B
from ...spec.tracer import callbacks
from ..plans.arguments import collect, with_tensors
from ..plans.shards import HookOff, attach, plain
from . import writes
from .agreed import all_ranks
from .refused_gradients import RaiseInBackward
from .views import on_one_device, strides_decide

_BEFORE_READ = callbacks("before_read")

# One entry for each moved view that is alive. While the list is empty, the hook skips looking for
# moved views among operands.
alive: list[None] = []

# In these views an element of the source may occur several times or only in part, so a write into
# them raises.
_NOT_ONE_TO_ONE = frozenset("as_strided expand expand_as broadcast_to unfold real imag".split())
# Part of torch's error for a view whose gradient it cannot know any more.
_BASE_WRITTEN = "its base or another view of its base has been modified inplace"
_UNSAFE_OPS = frozenset("unsafe_chunk unsafe_split unsafe_split_with_sizes".split())
# `write_into_source` carries integers as float64, which does not represent all values of these
# dtypes.
_INEXACT_DTYPES = frozenset((torch.int64, torch.uint64))


class MovedView:
    """Record of how a moved view, a view whose data boxing has copied, is taken from its source.

    It is an attribute of the view. It holds the call, the source and how often the source had been
    written when the view was taken, to see whether the view must be taken again.
    """

    __slots__ = (
        "_arguments", "_index", "_last_source", "_may_be_copy", "_name", "_records_grad", "_run",
        "_tensors", "_value",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        run: Any,
        arguments: tuple[tuple, dict],
        index: int | None,
        may_be_copy: bool = False,
    ) -> None:
        """Record the call that made the view.

        Args:
            name: name of the op.
            run: function that takes the view, called with ``arguments``.
            arguments: (args, kwargs) of the call; the first tensor in them is the source.
            index: position of the view in the call's result, or None if it is the result.
            may_be_copy: whether the result may be a copy on one device, because strides decide
                that.
        """
        alive.append(None)  # first: `__del__` runs even if a line below raises
        self._name, self._run, self._arguments, self._index = name, run, arguments, index
        self._records_grad, self._value = is_recording(), None
        self._may_be_copy = may_be_copy
        self._tensors: list[Any] = []  # the first is the source
        collect(arguments, self._tensors)
        self._record_version(*self._refresh_source())

    def __del__(self) -> None:
        alive.pop()
        if not alive:
            writes.clear_counts()

    def refresh(self, x: Any) -> Any:
        """Return the value of the view ``x``, taken again if its source was written since.

        Taking it again may communicate.
        """
        source, version = self._refresh_source()
        if (
            source is not self._last_source[0] or version != self._last_source[1]
        ) and not self.has_lost_source():
            # Checked only now, because it may communicate.
            if _is_copy(x):
                return x
            self._value = self._retake_view(source)
            self._record_version(source, version)
        return x if self._value is None else self._value

    def _retake_view(self, source: Any) -> Any:
        """Take the view of ``source`` again, with a gradient if the view before had one.

        For one of several views of a base that was written, torch refuses the gradient. Then the
        values can still be read, and the error is raised in backward, as torch does.
        """
        try:
            with torch.set_grad_enabled(self._records_grad):
                return self._view_of(source)
        except RuntimeError as error:
            if not (self._records_grad and _BASE_WRITTEN in str(error)):
                raise
            with torch.no_grad():
                view = self._view_of(source)
            values = plain(view).detach().requires_grad_()
            values_that_raise = RaiseInBackward.apply(values, str(error), all_ranks())
            return attach(values_that_raise, view._spec)

    def _record_version(self, source: Any, version: tuple[int, int]) -> None:
        # Hold the storage: writes are counted by its address, which another could reuse otherwise.
        self._last_source = source, version, writes.storage_of(source)

    def has_lost_source(self) -> bool:
        """Return whether the source has other memory than when the view was taken from it.

        This is so after ``source.data = other``. The view then stays as it is, because on one
        device a view keeps the memory that it was taken from.
        """
        source, _, memory = self._last_source
        storage = writes.storage_of(source)
        return storage is not None and storage._cdata != memory._cdata

    def refresh_if_local(self, x: Any) -> Any:
        """Return the up-to-date value of the view ``x``, or None if that needs communication."""
        source = refresh_if_local(self._tensors[0])
        is_current = (
            source is self._last_source[0] and writes.writes_of(source) == self._last_source[1]
        )
        is_current = is_current or (source is not None and self.has_lost_source())
        return (x if self._value is None else self._value) if is_current else None

    def is_view(self) -> bool:
        """Return whether the result would be a view on one device; a collective, the first time.

        A ``reshape`` returns a view or a copy depending on strides. If strides decide, the ranks
        use the answer of the rank with the largest shard, because a shard may have too few elements
        to tell.
        """
        if self._may_be_copy:
            placement = self._tensors[0]._spec.placement
            if my_coordinate(placement) is not None:
                source, view = self._on_one_device()
                shared = view.untyped_storage()._cdata == source.untyped_storage()._cdata
                own_answer = plain(self._tensors[0]).numel(), shared
                ranks = tuple(placement.ranks.ravel().tolist())
                if not max(gather_from_ranks(own_answer, ranks), key=itemgetter(0))[1]:
                    return False
            self._may_be_copy = False
        return True

    def _on_one_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (source, view) as meta tensors with the strides that they have on one device."""
        moved: Any = getattr(self._tensors[0], "_moved_view", None)
        with hidden_from_modes(), HookOff():
            tensors = [on_one_device(x) for x in self._tensors]
            if moved.__class__ is MovedView:
                tensors[0] = moved._on_one_device()[1]
            return tensors[0], self._run_view_op(tensors)

    def can_write(self, value: Any) -> bool:
        """Return whether a write of ``value`` into this view can be made in the source.

        It cannot for views that repeat elements, such as ``expand``, and for int64 and uint64,
        which ``write_into_source`` would round.
        """
        return self._name not in _NOT_ONE_TO_ONE and value.dtype not in _INEXACT_DTYPES

    def is_ambiguous(self) -> bool:
        """Return whether it is unclear what gradient a write into this view has.

        Such a write is refused. Torch refuses to write into a view that was taken in another grad
        mode, and leaves writes into views of ``unsafe_split`` to the responsibility of the program.
        """
        if self._name == "detach" or not (is_recording() and self._tensors[0].requires_grad):
            return False
        return not self._records_grad or self._name in _UNSAFE_OPS

    def write_into_source(self, value: Any) -> None:
        """Write ``value`` into the elements of the source that the view covers; differentiable.

        The positions are found by the backward of the view op, which maps a tensor like the view to
        one like the source with each element at its position. It is applied to ``value``.
        """
        source, tracked = self._refresh_source()[0], records((value,))
        if self._name == "detach":  # e.g. x.data, through which writes have no history
            with torch.no_grad():
                source.copy_(value)
            return
        has_gradients = source.is_floating_point() or source.is_complex()
        # Integers have no gradients, so they are carried as floats.
        dtype = source.dtype if has_gradients else torch.float64
        # The backward pass needs a graph, and inference tensors cannot be part of one.
        with torch.inference_mode(False), torch.enable_grad():
            blank = torch.zeros_like(source, dtype=dtype).requires_grad_()
            view = self._view_of(blank)
            # The gradient of ones is nonzero at the elements of the source that the view covers.
            (places,) = torch.autograd.grad(view, blank, torch.ones_like(view), retain_graph=True)
            value = value.clone() if writes.is_inference(value) else value
            (scattered,) = torch.autograd.grad(
                view, blank, value.to(dtype), create_graph=tracked, retain_graph=True
            )
            if not tracked and has_gradients and not dtype.is_complex and B in value._spec.sbp:
                # A B value is summed with zeros of other ranks on this way, and 0 + -0 is 0: find
                # the places of -0.0 by carrying the sign bits, and restore them.
                signs = torch.signbit(value).to(dtype)
                (negative,) = torch.autograd.grad(view, blank, signs, retain_graph=True)
                scattered = scattered.masked_fill((scattered == 0) & (negative != 0), -0.0)
        source.copy_(torch.where(places != 0, scattered.to(source.dtype), source))

    def _view_of(self, source: Any) -> Any:
        return self._run_view_op([source, *self._tensors[1:]])

    def _run_view_op(self, tensors: list[Any]) -> Any:
        args, kwargs = with_tensors(*self._arguments, tensors)
        result = self._run(*args, **kwargs)
        return result if self._index is None else result[self._index]

    def _refresh_source(self) -> tuple[Any, tuple[int, int]]:
        source = refresh(self._tensors[0])
        return source, writes.writes_of(source)


def refresh(x: Any) -> Any:
    """Return ``x``, brought up to date if it is a moved view whose source was written since.

    A moved view is the result of a view op for which boxing copied the data. Called on operands
    before an op reads them, while moved views exist.
    """
    for notify in _BEFORE_READ:
        notify(x)
    moved: Any = getattr(x, "_moved_view", None)  # plain tensors lack the attribute
    return moved.refresh(x) if moved.__class__ is MovedView else x


def refresh_if_local(x: Any) -> Any:
    """Return ``refresh(x)``, the up-to-date value of ``x``, or None if that would communicate.

    For printing, which one rank may do by itself.
    """
    moved: Any = getattr(x, "_moved_view", None)
    return moved.refresh_if_local(x) if moved.__class__ is MovedView else x


def refresh_arguments(args: tuple, kwargs: dict) -> tuple | None:
    """Return (args, kwargs) with moved views brought up to date, or None if all are so already.

    The C++ hook calls it before an op, while moved views exist.
    """
    tensors: list[Any] = []
    collect((args, kwargs), tensors)
    fresh_tensors = [refresh(x) for x in tensors]
    if all(a is b for a, b in zip(fresh_tensors, tensors, strict=True)):
        return None
    return with_tensors(args, kwargs, fresh_tensors)


def mark_moved_views(out: Any, plan: Any, source: Any, args: tuple, kwargs: dict) -> Any:
    """Mark ``out``, the result of a view op for which boxing moved the data, as moved views.

    ``out`` is one tensor or several, taken from ``source``; each gets a ``MovedView``. ``plan``,
    ``args`` and ``kwargs`` are those of the call that made it.
    """
    may_be_copy = strides_decide(plan, source, out)
    several = isinstance(out, tuple | list)
    views = [_detach_if_untracked(view) for view in (out if several else (out,))]
    for index, view in enumerate(views):
        if view is source:  # e.g. atleast_1d may return its input
            continue
        position = index if several else None
        view._moved_view = MovedView(
            plan.name, plan.function, (args, kwargs), position, may_be_copy
        )
    return type(out)(views) if several else views[0]


def _detach_if_untracked(view: Any) -> Any:
    """Return the result ``view`` of a view op, detached if autograd is not recording.

    A view in a rank's own memory can require the gradient of its base even under ``no_grad``, but a
    copy that was communicated does not.
    """
    if is_recording() or not view.requires_grad:
        return view
    return attach(plain(view).detach(), view._spec)


def write_through(plan: Any, args: tuple, kwargs: dict, view: Any) -> Any:
    """Run an in-place op on a copy of the moved view ``view``, and write the copy into its source.

    ``plan`` is that of the op, ``args`` and ``kwargs`` its arguments, with ``view`` as the first.
    """
    if _is_copy(view):
        return plan.function(*args, **kwargs)
    moved = _writable_record(view, plan.name)
    copy, tensors = view.clone(), []
    collect((args, kwargs), tensors)
    args, kwargs = with_tensors(args, kwargs, [copy, *tensors[1:]])
    out = plan.function(*args, **kwargs)
    moved.write_into_source(copy)
    return None if out is None else view


def write_into_view(view: Any, value: Any, name: str) -> None:
    """Write ``value`` into ``view``, a moved view, for the op ``name``.

    The value ends up in the tensor from which the view was taken.
    """
    if _is_copy(view):
        view.copy_(value)
    else:
        _writable_record(view, name).write_into_source(value)


def _is_copy(view: Any) -> bool:
    """Return whether the moved view ``view`` turns out to be a copy on one device.

    This may be so for ``reshape``. In that case it stops being a moved view: writes into it do not
    reach its source.
    """
    moved = view._moved_view
    if moved.__class__ is not MovedView or moved.is_view():
        return False
    view._moved_view = False
    return True


def _writable_record(view: Any, name: str) -> MovedView:
    moved = view._moved_view
    if moved.__class__ is not MovedView or not moved.can_write(view) or moved.has_lost_source():
        raise moved_view_error(name)
    if moved.is_ambiguous():
        raise RuntimeError(
            f"{name}_: this view was taken where no gradient is recorded, or by an unsafe_ op, and "
            "is written where one is, so it is unclear what gradient the write has.\n"
            "  Take the view and write into it either both inside of torch.no_grad() or both "
            "outside, and by an op that is not an unsafe_ one."
        )
    return moved


def moved_view_error(name: str) -> RuntimeError:
    """Return the error for a write into a moved view that cannot be made in the view's source."""
    return RuntimeError(
        f"{name}_: this tensor is a view on one device, but boxing had to move its data, and what "
        "is written here cannot be put into "
        "the tensor it was taken from. Write into that tensor instead: x[index] = value."
    )


def any_moved(args: tuple, kwargs: dict) -> bool:
    """Return whether the list that a foreach op modifies contains a moved view.

    A moved view is the result of a view op for which boxing had to copy the data. The list is the
    first argument of the op.
    """
    tensors: list[Any] = []
    collect((*args, *kwargs.values())[:1], tensors)
    return any(getattr(x, "_moved_view", False) for x in tensors)


def refuse_moved(name: str, args: tuple, kwargs: dict) -> None:
    """Raise if an op over lists is about to modify a moved view, a view that boxing has copied.

    A foreach op modifies its first list; a fused optimizer step also all others but the gradients,
    which come second.
    """
    rest = (*args, *kwargs.values())[2:] if name.startswith("_fused_") else ()
    if any_moved(args, kwargs) or any_moved((rest,), {}):
        raise moved_view_error(name)
