"""Defer the calls of experts in a loop over them, and run them all at once.

```
for e, expert in enumerate(self.experts):
    at, slot = torch.where(index == e)                     not run: see selected.py
    out[at] += weights[at, slot, None] * expert(x[at])     not run: one more addend of out
return out                                                 out is read: now all addends are computed
```

A function mode sees the calls of torch that the loop makes. Calls of the form above are deferred.
Each other call runs as it is written, after the deferred values that it needs were computed. So a
loop of another form, or one whose sums are read half way, gives the right result, too; its experts
run one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...dispatch.planning import autocast
from ...dispatch.plans.shards import is_global
from ...spec.nested import tensors_in
from ...spec.tracer import Tracer
from .selected import Chosen, Made, Picked, Raised, Selected, closed, memory, picked, real


@dataclass
class Addends:
    """Results of experts that are to be added to one tensor, collected while a loop runs.

    Args:
        out: the tensor [..., features] to which the loop adds them.
        x: the tensor whose rows the experts take.
        made: the results, in order.
        again: for each result, a function that adds it to ``out`` as the loop does.
        is_fresh: whether the loop created ``out`` as a plain tensor, and no other tensor shares its
            memory.
    """

    out: Tensor
    x: Tensor
    made: list[Made] = field(default_factory=list)
    again: list[Callable[[], Any]] = field(default_factory=list)
    is_fresh: bool = False

    def memories(self) -> set[int]:
        """Return identifiers (``memory``) of all memory from which the results are computed.

        The results have to be computed before any of it is overwritten.
        """
        return set[int]().union(*(made.memories() for made in self.made))


class Loop(TorchFunctionMode):
    """Function mode in which a module's loop over experts runs: it collects the calls of experts.

    Calls of torch that select tokens, weight results and add them are deferred. All other calls run
    as written, after the deferred values that they need were computed.

    Args:
        of_one: runs one expert: (its index, its argument) -> its result.
        add_at_once: computes and adds all collected results; returns False if it cannot.
    """

    def __init__(
        self,
        of_one: Callable[[int, Any], Any],
        add_at_once: Callable[[Addends], bool],
    ) -> None:
        super().__init__()
        self.of_one, self._add_at_once = of_one, add_at_once
        self.numbers = itertools.count()
        # Number -> deferred value that the program still holds. Numbers ascend, so that all ranks
        # compute these values in the same order.
        self.live: WeakValueDictionary[int, Selected] = WeakValueDictionary()
        self._pending: Addends | None = None
        self._base: ref[Selected] | None = None
        self._indices: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._fresh: dict[int, Tensor] = {}
        self._roots: dict[int, tuple[Tensor, Tensor]] = {}
        self._as_written = False
        self.state = _state()

    @property
    def is_paused(self) -> bool:
        """Return whether grad mode or autocast differ from where the loop began.

        Deferred calls run with the settings of the beginning, so no call is deferred meanwhile.
        """
        return _state() != self.state

    @property
    def records(self) -> bool:
        """Return whether gradients were recorded where the loop began."""
        return self.state[0]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Collect the calls of torch inside the context.

        At its end all results are added, and the values that the program still holds are computed.
        Reads of a global tensor without a call of torch, as by ``to_local``, are watched, too.
        """
        with Tracer(before_read=self._before_read).tracing():
            with self:
                yield
            self._finish()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # They are disabled where the library itself works on shards.
        if self._as_written or not torch._C._is_torch_function_enabled():
            return func(*args, **kwargs)
        self.settle()
        args, kwargs = closed(args), dict(closed(kwargs))
        note = None if self.is_paused else _NOTED.get(getattr(func, "__name__", ""))
        made = NotImplemented if note is None else note(self, func, *args, **kwargs)
        return self._run(func, args, kwargs) if made is NotImplemented else made

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call as it is written, after computing the values that it uses or overwrites."""
        given = tensors_in((args, kwargs))
        if self._pending is not None and memory(self._pending.out) in map(memory, given):
            self.flush()
        if given and _writes(func, kwargs):
            written = kwargs.get("out", args[0] if args else None)
            for x in tensors_in(written):
                self.before_write(x)
        for x in given:
            self._fresh.pop(id(x), None)
        made = func(*real(args), **real(kwargs))
        if not given and isinstance(made, Tensor) and not is_global(made):
            self._fresh[id(made)] = made
        is_mask = isinstance(made, Tensor) and made.dtype is torch.bool and given
        if is_mask and getattr(func, "__name__", "") in _IN_ORDER:
            self._roots[id(made)] = made, self._root(given[0])
        return made

    def before_write(self, x: Tensor, but: tuple[Selected, ...] = ()) -> None:
        """Compute what depends on the values of ``x``, before these are overwritten.

        Args:
            x: the tensor that is to be written.
            but: deferred values that need not be computed.
        """
        where = memory(x)
        if self._pending is not None and where in self._pending.memories():
            self.flush()
        for each in list(self.live.values()):
            if all(each is not x for x in but) and where in each.memories():
                each.close()
        for known in (self._indices, self._roots):
            for key in [key for key, found in known.items() if where in _memories(found)]:
                del known[key]

    def _before_read(self, x: Tensor) -> None:
        """Add the collected results to ``x`` before its shard is read."""
        pending = self._pending  # the read may be in another thread
        if pending is not None and not self._as_written and memory(pending.out) == memory(x):
            self.settle()
            self.flush()

    def settle(self) -> None:
        """Add the last collected result at once if the program still holds ``out[at]`` from before.

        These old rows may be used later: ``rows = out[at]; out[at] = rows + made; use(rows)``. So
        they are computed, and the result is added as the loop has written it. Called before the
        next call of torch, when it is known whether the program still holds the rows.
        """
        base, self._base = self._base and self._base(), None
        if base is None or self._pending is None:
            return
        add = self._pending.again.pop()
        self._pending.made.pop()
        self.flush()
        base.close()
        with self.as_written():
            add()

    def _finish(self) -> None:
        """Add all results, and compute the deferred values that the program still holds."""
        self.settle()
        self.flush()
        for each in list(self.live.values()):
            each.close()

    def flush(self) -> None:
        """Compute the collected results, at once or else one by one, and add them to ``out``."""
        found, self._pending = self._pending, None
        if found is None or not found.made:
            return
        with self.as_written():
            if not self._add_at_once(found):
                for add in found.again:
                    add()

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Run calls of torch inside the context without deferring them.

        Grad mode and autocast are those of where the loop began.
        """
        before, self._as_written = self._as_written, True
        grad, casts = self.state
        try:
            with ExitStack() as stack:
                if self.is_paused:
                    stack.enter_context(torch.set_grad_enabled(grad))
                    for cast in set(casts).difference(_state()[1]):
                        device, is_on, dtype = cast
                        stack.enter_context(torch.autocast(device, dtype, is_on))
                yield
        finally:
            self._as_written = before

    # -- for the values ----------------------------------------------------------------------------

    def computed(self, value: Selected) -> Tensor:
        """Compute a deferred value, after adding the collected results that it reads."""
        with self.as_written():
            if self._pending is not None:
                if memory(self._pending.out) in value.memories():
                    self.flush()
            return value.compute()

    def indices(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Return ``torch.where(mask)``, computed once, and again after a write to ``mask``."""
        if id(mask) not in self._indices:
            self._indices[id(mask)] = mask, torch.where(mask)
        return self._indices[id(mask)][1]

    def _root(self, mask: Tensor) -> Tensor:
        """Return the mask of which ``mask`` is a reshaped view with its entries in the same order.

        It is ``mask`` itself if it is no such view.
        """
        return self._roots.get(id(mask), (mask, mask))[1]

    def alike(self, a: Picked, b: Picked) -> bool:
        """Return whether ``a`` and ``b`` select by the same mask, so that their rows correspond."""
        if a.mask is b.mask:
            return True
        return a.is_of_whole and b.is_of_whole and self._root(a.mask) is self._root(b.mask)

    def expert(self, number: int, rows: Picked) -> Any:
        """Defer a call of expert ``number`` on ``rows``; return a deferred value for its result.

        If ``rows`` is not [entries, features], the expert runs at once.
        """
        if not rows.are_rows:
            return self.of_one(number, rows.real())
        with self.as_written():
            if self._pending is not None and memory(rows.source) == memory(self._pending.out):
                self.flush()
        return Made(self, number, rows)

    # -- calls that are deferred -------------------------------------------------------------------

    def where(self, func: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_global(mask) or mask.ndim == 0:
            return NotImplemented
        return tuple(Chosen(self, mask, dim) for dim in range(mask.ndim))

    def nonzero(self, func: Any, mask: Any, *args: Any, as_tuple: bool = False) -> Any:
        return self.where(func, mask, *args) if as_tuple else NotImplemented

    def get(self, func: Any, x: Any, index: Any) -> Any:
        found = picked(self, x, index) if isinstance(x, Tensor) else None
        return NotImplemented if found is None else found

    def multiply(self, func: Any, a: Any, b: Any = None, **kwargs: Any) -> Any:
        if isinstance(a, Made) and not kwargs:
            return a * b
        return b * a if isinstance(b, Made) and not kwargs else NotImplemented

    def index_add(self, func: Any, out: Any, dim: Any, index: Any, made: Any, **kwargs: Any) -> Any:
        if dim != 0 or not isinstance(index, Chosen) or not isinstance(made, Made) or kwargs:
            return NotImplemented
        if index.mask is not made.rows.mask or made.rows.dims != (index.dim,):
            return NotImplemented
        made = made.now()

        def again() -> None:
            func(out, 0, index.real(), made.real())

        return out if self._noted(out, made, again) else NotImplemented

    def set(self, func: Any, x: Any, index: Any, value: Any) -> Any:
        if not isinstance(value, Raised) or value.base.source is not x:
            return NotImplemented
        base, made = value.base, value.made
        at = picked(self, x, index)
        if at is None or not (self.alike(at, base) and self.alike(at, made.rows)):
            return NotImplemented
        if at.dims != base.dims or at.form != base.form:
            return NotImplemented
        if at.mask is made.rows.mask and at.dims != made.rows.dims:
            return NotImplemented

        # Torch does not define the result if an index selects an entry twice.
        def again() -> None:
            where = real(index)
            func(x, where, x[where] + made.real())

        if not self._noted(x, made, again, value, base, at):
            return NotImplemented
        self._base = ref(base)
        return None

    def _noted(self, out: Any, made: Made, again: Callable[[], Any], *but: Selected) -> bool:
        """Collect a result that the loop adds to ``out``; return False if it cannot be collected.

        Args:
            out: the tensor to which ``made`` is added.
            made: the result of an expert.
            again: adds ``made`` to ``out`` as the loop does.
            but: deferred values of the same statement, which need not be computed before the write.
        """
        x = made.rows.source
        fits = out.ndim > 1 and out.shape[-1] > 1 and out.shape[:-1].numel() == x.shape[:-1].numel()
        if not fits or (out.is_leaf and out.requires_grad):
            return False
        if memory(out) in made.memories():
            return False  # the next expert takes what this one adds
        last = self._pending
        if last is not None and (last.out is not out or last.x is not x):
            self.flush()
        self.before_write(out, but)
        if self._pending is None:
            self._pending = Addends(out, x, is_fresh=id(out) in self._fresh)
        self._pending.made.append(made)
        self._pending.again.append(again)
        return True


def _state() -> tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]:
    """Return (whether gradients are recorded, the settings of autocast) of this moment."""
    return torch.is_grad_enabled(), autocast.now()


# Functions whose result has the entries of their first argument, in the same order.
_IN_ORDER = frozenset("view reshape flatten ravel view_as reshape_as squeeze unsqueeze".split())

_NOTED: dict[str, Callable[..., Any]] = {
    "where": Loop.where,
    "nonzero": Loop.nonzero,
    "__getitem__": Loop.get,
    "__setitem__": Loop.set,
    "mul": Loop.multiply,
    "index_add_": Loop.index_add,
}


def _memories(found: tuple[Any, Any]) -> set[int]:
    """Return identifiers of the memory of all tensors in ``found``."""
    return set(map(memory, tensors_in(found)))


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function of torch writes to an argument, as ``add_`` or ``out=`` does."""
    name = getattr(func, "__name__", "")
    in_place = (
        name.startswith("__i")
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
    )
    return in_place or kwargs.get("out") is not None
