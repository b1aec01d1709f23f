"""Views whose data boxing moved.

On one device a view shares storage with its source. One that was moved is a copy that remembers its
source: when it is read after the source was written, it is taken again; what is written into it is
put into the source.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from mirrored.every_rank import gathered
from mirrored.transports.base.unseen import unseen

from ...movement.grad_mode import is_recording, records
from ...movement.world import my_coordinate
from ...spec import B
from ..plans.arguments import collect, with_tensors
from ..plans.shards import HookOff, attach, plain
from . import writes
from .agreed import all_ranks
from .refused_gradients import Refused
from .views import on_one_device, strides_decide

# One entry for each moved view; while the list is not empty, the hook looks for moved views among
# operands.
alive: list[None] = []

# An element of these stands for several elements, or for a part of one: writing into them raises.
_NOT_ONE_TO_ONE = frozenset("as_strided expand expand_as broadcast_to unfold real imag".split())
# What torch says of a view whose gradient it cannot know any more.
_WRITTEN = "its base or another view of its base has been modified inplace"
_UNSAFE = frozenset("unsafe_chunk unsafe_split unsafe_split_with_sizes".split())
_INEXACT = frozenset((torch.int64, torch.uint64))  # not all of their values are exact in float64


class MovedView:
    """How a view is taken from its source, and the source and its version when it was last
    taken."""

    __slots__ = (
        "_doubtful", "_given", "_graded", "_index", "_name", "_run", "_seen", "_tensors", "_value",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        run: Any,
        given: tuple[tuple, dict],
        index: int | None,
        doubtful: bool = False,
    ) -> None:
        """``doubtful``: strides decide whether this is a view."""
        alive.append(None)  # first: `__del__` runs even if a line below raises
        self._name, self._run, self._given, self._index = name, run, given, index
        self._graded, self._value = is_recording(), None
        self._doubtful = doubtful
        self._tensors: list[Any] = []  # the first is the source
        collect(given, self._tensors)
        self._see(*self._source())

    def __del__(self) -> None:
        alive.pop()
        if not alive:
            writes.forget()

    def fresh(self, x: Any) -> Any:
        """The view ``x`` of what its source holds now."""
        source, version = self._source()
        if (source is not self._seen[0] or version != self._seen[1]) and not self.is_cut():
            if _is_copy(x):
                return x
            self._value = self._retaken(source)
            self._see(source, version)
        return x if self._value is None else self._value

    def _retaken(self, source: Any) -> Any:
        """The view of ``source``, with a gradient if it had one. Torch refuses that of a source
        that is one view of several whose base was written; as there, values can still be read."""
        try:
            with torch.set_grad_enabled(self._graded):
                return self._taken_from(source)
        except RuntimeError as error:
            if not (self._graded and _WRITTEN in str(error)):
                raise
            with torch.no_grad():
                taken = self._taken_from(source)
            values = plain(taken).detach().requires_grad_()
            refused = Refused.apply(values, str(error), all_ranks())
            return attach(refused, taken._spec)

    def _see(self, source: Any, version: tuple[int, int]) -> None:
        # Its memory is held, so that no other has its address, by which writes are counted.
        self._seen = source, version, writes.memory(source)

    def is_cut(self) -> bool:
        """Whether the source has other memory by now, as after ``source.data = other``. A view
        keeps the memory that it was taken from."""
        source, _, memory = self._seen
        now = writes.memory(source)
        return now is not None and now._cdata != memory._cdata

    def current(self, x: Any) -> Any:
        """``fresh(x)`` if that takes no communication; else None."""
        source = up_to_date(self._tensors[0])
        same = source is self._seen[0] and writes.count(source) == self._seen[1]
        same = same or (source is not None and self.is_cut())
        return (x if self._value is None else self._value) if same else None

    def is_view(self) -> bool:
        """Whether it is one on one device. Where strides decide, ranks believe those of the largest
        shard, for a shard may have too few elements to tell. A collective, the first time."""
        if self._doubtful:
            placement = self._tensors[0]._spec.placement
            if my_coordinate(placement) is not None:
                source, made = self._on_one_device()
                shared = made.untyped_storage()._cdata == source.untyped_storage()._cdata
                mine = plain(self._tensors[0]).numel(), shared
                ranks = tuple(placement.ranks.ravel().tolist())
                if not max(gathered(mine, ranks), key=itemgetter(0))[1]:
                    return False
            self._doubtful = False
        return True

    def _on_one_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The source and the view as they lie in the memory of one device, without values."""
        moved: Any = getattr(self._tensors[0], "_moved_view", None)
        with unseen(), HookOff():
            tensors = [on_one_device(x) for x in self._tensors]
            if moved.__class__ is MovedView:
                tensors[0] = moved._on_one_device()[1]
            return tensors[0], self._taken(tensors)

    def takes(self, value: Any) -> bool:
        """Whether `put` can write such a value."""
        return self._name not in _NOT_ONE_TO_ONE and value.dtype not in _INEXACT

    def is_ambiguous(self) -> bool:
        """Whether nobody knows what gradient a write has: torch refuses to write into a view that
        was taken in another grad mode, and of ``unsafe_split`` says that the program must know."""
        if self._name == "detach" or not (is_recording() and self._tensors[0].requires_grad):
            return False
        return not self._graded or self._name in _UNSAFE

    def put(self, value: Any) -> None:
        """Write ``value`` where the view was taken from; differentiable.

        The value goes the way that the view's gradient would go: each element goes to its place.
        """
        source, tracked = self._source()[0], records((value,))
        if self._name == "detach":
            with torch.no_grad():
                source.copy_(value)
            return
        has_gradients = source.is_floating_point() or source.is_complex()
        dtype = source.dtype if has_gradients else torch.float64
        # A graph is recorded, and nothing of it is an inference tensor.
        with torch.inference_mode(False), torch.enable_grad():
            blank = torch.zeros_like(source, dtype=dtype).requires_grad_()
            view = self._taken_from(blank)
            (places,) = torch.autograd.grad(view, blank, torch.ones_like(view), retain_graph=True)
            value = value.clone() if writes.is_inference(value) else value
            (put,) = torch.autograd.grad(
                view, blank, value.to(dtype), create_graph=tracked, retain_graph=True
            )
            if not tracked and has_gradients and not dtype.is_complex and B in value._spec.sbp:
                # Where it lies whole on several ranks, the zeros of others are added: 0 + -0 is 0.
                signs = torch.signbit(value).to(dtype)
                (minus,) = torch.autograd.grad(view, blank, signs, retain_graph=True)
                put = put.masked_fill((put == 0) & (minus != 0), -0.0)
        source.copy_(torch.where(places != 0, put.to(source.dtype), source))

    def _taken_from(self, source: Any) -> Any:
        return self._taken([source, *self._tensors[1:]])

    def _taken(self, tensors: list[Any]) -> Any:
        args, kwargs = with_tensors(*self._given, tensors)
        made = self._run(*args, **kwargs)
        return made if self._index is None else made[self._index]

    def _source(self) -> tuple[Any, tuple[int, int]]:
        source = fresh(self._tensors[0])
        return source, writes.count(source)


def fresh(x: Any) -> Any:
    """``x``, or the same view of what its source holds now."""
    moved: Any = getattr(x, "_moved_view", None)  # a plain tensor, which is B here, has none
    return moved.fresh(x) if moved.__class__ is MovedView else x


def up_to_date(x: Any) -> Any:
    """``fresh(x)`` if that takes no communication; else None."""
    moved: Any = getattr(x, "_moved_view", None)
    return moved.current(x) if moved.__class__ is MovedView else x


def freshened(args: tuple, kwargs: dict) -> tuple | None:
    """(args, kwargs) with fresh tensors; None if all are fresh already."""
    given: list[Any] = []
    collect((args, kwargs), given)
    new = [fresh(x) for x in given]
    if all(a is b for a, b in zip(new, given, strict=True)):
        return None
    return with_tensors(args, kwargs, new)


def remember(out: Any, plan: Any, source: Any, args: tuple, kwargs: dict) -> Any:
    """The views ``out``, which the call of ``plan`` has moved and which remember ``source`` now."""
    doubtful = strides_decide(plan, source, out)
    several = isinstance(out, tuple | list)
    views = [_cut_off(view) for view in (out if several else (out,))]
    for index, view in enumerate(views):
        if view is source:  # as atleast_1d gives it
            continue
        at = index if several else None
        view._moved_view = MovedView(plan.name, plan.function, (args, kwargs), at, doubtful)
    return type(out)(views) if several else views[0]


def _cut_off(view: Any) -> Any:
    """``view``; without a gradient if none is recorded. What is a view in a rank's own memory asks
    for the gradient of its base even then, and what was sent does not."""
    if is_recording() or not view.requires_grad:
        return view
    return attach(plain(view).detach(), view._spec)


def write_through(plan: Any, args: tuple, kwargs: dict, view: Any) -> Any:
    """Run an in-place op of a moved view on a copy, which is then put into the view's source."""
    if _is_copy(view):
        return plan.function(*args, **kwargs)
    moved = _writable(view, plan.name)
    written, given = view.clone(), []
    collect((args, kwargs), given)
    args, kwargs = with_tensors(args, kwargs, [written, *given[1:]])
    out = plan.function(*args, **kwargs)
    moved.put(written)
    return None if out is None else view


def put(view: Any, value: Any, name: str) -> None:
    """Write ``value`` where the moved ``view`` was taken from."""
    if _is_copy(view):
        view.copy_(value)
    else:
        _writable(view, name).put(value)


def _is_copy(view: Any) -> bool:
    """Whether it turns out that the moved ``view`` is a copy on one device; then it is not a moved
    view any more."""
    moved = view._moved_view
    if moved.__class__ is not MovedView or moved.is_view():
        return False
    view._moved_view = False
    return True


def _writable(view: Any, name: str) -> MovedView:
    moved = view._moved_view
    if moved.__class__ is not MovedView or not moved.takes(view) or moved.is_cut():
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
    return RuntimeError(
        f"{name}_: this tensor is a view on one device, but boxing had to move its data, and what "
        "is written here cannot be put into "
        "the tensor it was taken from. Write into that tensor instead: x[index] = value."
    )


def any_moved(args: tuple, kwargs: dict) -> bool:
    """Whether a list op is about to write into a moved view: into its first list."""
    given: list[Any] = []
    collect((*args, *kwargs.values())[:1], given)
    return any(getattr(x, "_moved_view", False) for x in given)


def refuse_moved(name: str, args: tuple, kwargs: dict) -> None:
    """Raise if a list op is about to write into a moved view: into its first list, or, if it is a
    fused step, into all but the gradients, which come second."""
    rest = (*args, *kwargs.values())[2:] if name.startswith("_fused_") else ()
    if any_moved(args, kwargs) or any_moved((rest,), {}):
        raise moved_view_error(name)
