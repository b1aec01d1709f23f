"""Defer the calls of experts in a loop over them, and run them all at once.

```
for e, expert in enumerate(self.experts):
    at, slot = torch.where(index == e)                     not run: see selected.py
    out[at] += weights[at, slot, None] * expert(x[at])     not run: one more addend of out
return out                                                 out is read: now all addends are computed
```

A function mode sees the calls of torch that the loop makes. Calls of the form above are deferred.
Each other call runs as it is written, after the deferred values that it needs were computed. So a
loop of another form, or one whose sums are read half way, gives the correct result, too; its
experts run one by one.
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
from .selected import (
    ExpertResult,
    IncrementedRows,
    MaskIndices,
    Selected,
    SelectedEntries,
    materialize,
    materialize_closed,
    memory_id,
    select_entries,
)


@dataclass
class Addends:
    """Results of experts that are to be added to one tensor, collected while a loop runs.

    Args:
        out: the tensor [..., features] to which the loop adds them.
        x: the tensor whose rows the experts take.
        results: the results, in order.
        adders: for each result, a function that adds it to ``out`` as the loop does.
        is_fresh: whether the loop created ``out`` as a plain tensor, and no other tensor shares its
            memory.
    """

    out: Tensor
    x: Tensor
    results: list[ExpertResult] = field(default_factory=list)
    adders: list[Callable[[], Any]] = field(default_factory=list)
    is_fresh: bool = False

    def memory_ids(self) -> set[int]:
        """Return identifiers (``memory_id``) of all memory from which the results are computed.

        The results have to be computed before any of it is overwritten.
        """
        return set[int]().union(*(result.memory_ids() for result in self.results))


class Loop(TorchFunctionMode):
    """Function mode in which a module's loop over experts runs: it collects the calls of experts.

    Calls of torch that select tokens, weight results and add them are deferred. All other calls run
    as written, after the deferred values that they need were computed.

    Args:
        run_expert: runs one expert: (its index, its argument) -> its result.
        add_all: computes and adds all collected results; returns False if it cannot.
    """

    def __init__(
        self,
        run_expert: Callable[[int, Any], Any],
        add_all: Callable[[Addends], bool],
    ) -> None:
        super().__init__()
        self.run_expert, self._add_all = run_expert, add_all
        self.numbers = itertools.count()
        # Number -> deferred value that the program still holds. Numbers ascend, so that all ranks
        # compute these values in the same order.
        self.deferred_values: WeakValueDictionary[int, Selected] = WeakValueDictionary()
        self._pending: Addends | None = None
        self._old_rows: ref[Selected] | None = None
        self._indices: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._created_tensors: dict[int, Tensor] = {}
        self._base_masks: dict[int, tuple[Tensor, Tensor]] = {}
        self._runs_as_written = False
        self.state = _grad_and_autocast()

    @property
    def is_paused(self) -> bool:
        """Return whether grad mode or autocast differ from where the loop began.

        Deferred calls run with the settings of the beginning, so no call is deferred meanwhile.
        """
        return _grad_and_autocast() != self.state

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
        if self._runs_as_written or not torch._C._is_torch_function_enabled():
            return func(*args, **kwargs)
        self.settle_old_rows()
        args, kwargs = materialize_closed(args), dict(materialize_closed(kwargs))
        defer = None if self.is_paused else _DEFERRED_CALLS.get(getattr(func, "__name__", ""))
        result = NotImplemented if defer is None else defer(self, func, *args, **kwargs)
        return self._run_as_written(func, args, kwargs) if result is NotImplemented else result

    def _run_as_written(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call as it is written, after computing the values that it uses or overwrites."""
        inputs = tensors_in((args, kwargs))
        if self._pending is not None and memory_id(self._pending.out) in map(memory_id, inputs):
            self.flush()
        if inputs and _writes_to_argument(func, kwargs):
            outputs = kwargs.get("out", args[0] if args else None)
            for x in tensors_in(outputs):
                self.before_write(x)
        for x in inputs:
            self._created_tensors.pop(id(x), None)
        result = func(*materialize(args), **materialize(kwargs))
        if not inputs and isinstance(result, Tensor) and not is_global(result):
            self._created_tensors[id(result)] = result
        is_mask = isinstance(result, Tensor) and result.dtype is torch.bool and inputs
        if is_mask and getattr(func, "__name__", "") in _ORDER_KEEPING:
            self._base_masks[id(result)] = result, self._base_mask(inputs[0])
        return result

    def before_write(self, x: Tensor, unaffected: tuple[Selected, ...] = ()) -> None:
        """Compute deferred values that depend on the values of ``x``, before these are overwritten.

        Args:
            x: the tensor that is to be written.
            unaffected: deferred values that need not be computed.
        """
        storage = memory_id(x)
        if self._pending is not None and storage in self._pending.memory_ids():
            self.flush()
        for value in list(self.deferred_values.values()):
            if all(value is not x for x in unaffected) and storage in value.memory_ids():
                value.close()
        for cache in (self._indices, self._base_masks):
            for key in [key for key, entry in cache.items() if storage in _memory_of_entry(entry)]:
                del cache[key]

    def _before_read(self, x: Tensor) -> None:
        """Add the collected results to ``x`` before its shard is read."""
        pending = self._pending  # the read may be in another thread
        if (
            pending is not None
            and not self._runs_as_written
            and memory_id(pending.out) == memory_id(x)
        ):
            self.settle_old_rows()
            self.flush()

    def settle_old_rows(self) -> None:
        """Add the last collected result at once if the program still holds ``out[at]`` from before.

        These old rows may be used later: ``rows = out[at]; out[at] = rows + made; use(rows)``. So
        they are computed, and the result is added as the loop has written it. Called before the
        next call of torch, when it is known whether the program still holds the rows.
        """
        base, self._old_rows = self._old_rows and self._old_rows(), None
        if base is None or self._pending is None:
            return
        add = self._pending.adders.pop()
        self._pending.results.pop()
        self.flush()
        base.close()
        with self.as_written():
            add()

    def _finish(self) -> None:
        """Add all results, and compute the deferred values that the program still holds."""
        self.settle_old_rows()
        self.flush()
        for value in list(self.deferred_values.values()):
            value.close()

    def flush(self) -> None:
        """Compute the collected results, at once or else one by one, and add them to ``out``."""
        addends, self._pending = self._pending, None
        if addends is None or not addends.results:
            return
        with self.as_written():
            if not self._add_all(addends):
                for add in addends.adders:
                    add()

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Run calls of torch inside the context without deferring them.

        Grad mode and autocast are those of where the loop began.
        """
        previous, self._runs_as_written = self._runs_as_written, True
        grad, casts = self.state
        try:
            with ExitStack() as stack:
                if self.is_paused:
                    stack.enter_context(torch.set_grad_enabled(grad))
                    for cast in set(casts).difference(_grad_and_autocast()[1]):
                        device, is_on, dtype = cast
                        stack.enter_context(torch.autocast(device, dtype, is_on))
                yield
        finally:
            self._runs_as_written = previous

    # -- for the values ----------------------------------------------------------------------------

    def compute_deferred(self, value: Selected) -> Tensor:
        """Compute a deferred value, after adding the collected results that it reads."""
        with self.as_written():
            if self._pending is not None:
                if memory_id(self._pending.out) in value.memory_ids():
                    self.flush()
            return value.compute()

    def indices(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Return ``torch.where(mask)``, computed once, and again after a write to ``mask``."""
        if id(mask) not in self._indices:
            self._indices[id(mask)] = mask, torch.where(mask)
        return self._indices[id(mask)][1]

    def _base_mask(self, mask: Tensor) -> Tensor:
        """Return the mask of which ``mask`` is a reshaped view with its entries in the same order.

        It is ``mask`` itself if it is no such view.
        """
        return self._base_masks.get(id(mask), (mask, mask))[1]

    def have_same_entries(self, a: SelectedEntries, b: SelectedEntries) -> bool:
        """Return whether ``a`` and ``b`` select by the same mask, so that their rows correspond."""
        if a.mask is b.mask:
            return True
        return (
            a.has_all_mask_dims
            and b.has_all_mask_dims
            and self._base_mask(a.mask) is self._base_mask(b.mask)
        )

    def defer_expert(self, number: int, rows: SelectedEntries) -> Any:
        """Defer a call of expert ``number`` on ``rows``; return a deferred value for its result.

        If ``rows`` is not [entries, features], the expert runs at once.
        """
        if not rows.are_rows:
            return self.run_expert(number, rows.materialize())
        with self.as_written():
            if self._pending is not None and memory_id(rows.source) == memory_id(self._pending.out):
                self.flush()
        return ExpertResult(self, number, rows)

    # -- calls that are deferred -------------------------------------------------------------------

    def where(self, func: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_global(mask) or mask.ndim == 0:
            return NotImplemented
        return tuple(MaskIndices(self, mask, dim) for dim in range(mask.ndim))

    def nonzero(self, func: Any, mask: Any, *args: Any, as_tuple: bool = False) -> Any:
        return self.where(func, mask, *args) if as_tuple else NotImplemented

    def get(self, func: Any, x: Any, index: Any) -> Any:
        rows = select_entries(self, x, index) if isinstance(x, Tensor) else None
        return NotImplemented if rows is None else rows

    def multiply(self, func: Any, a: Any, b: Any = None, **kwargs: Any) -> Any:
        if isinstance(a, ExpertResult) and not kwargs:
            return a * b
        return b * a if isinstance(b, ExpertResult) and not kwargs else NotImplemented

    def index_add(
        self, func: Any, out: Any, dim: Any, index: Any, result: Any, **kwargs: Any
    ) -> Any:
        if (
            dim != 0
            or not isinstance(index, MaskIndices)
            or not isinstance(result, ExpertResult)
            or kwargs
        ):
            return NotImplemented
        if index.mask is not result.rows.mask or result.rows.dims != (index.dim,):
            return NotImplemented
        result = result.snapshot()

        def add() -> None:
            func(out, 0, index.materialize(), result.materialize())

        return out if self._collect(out, result, add) else NotImplemented

    def set(self, func: Any, x: Any, index: Any, value: Any) -> Any:
        if not isinstance(value, IncrementedRows) or value.base.source is not x:
            return NotImplemented
        base, result = value.base, value.result
        target = select_entries(self, x, index)
        if target is None or not (
            self.have_same_entries(target, base) and self.have_same_entries(target, result.rows)
        ):
            return NotImplemented
        if target.dims != base.dims or target.form != base.form:
            return NotImplemented
        if target.mask is result.rows.mask and target.dims != result.rows.dims:
            return NotImplemented

        # Torch does not define the result if an index selects an entry twice.
        def add() -> None:
            positions = materialize(index)
            func(x, positions, x[positions] + result.materialize())

        if not self._collect(x, result, add, value, base, target):
            return NotImplemented
        self._old_rows = ref(base)
        return None

    def _collect(
        self, out: Any, result: ExpertResult, add: Callable[[], Any], *unaffected_values: Selected
    ) -> bool:
        """Collect a result that the loop adds to ``out``; return False if it cannot be collected.

        Args:
            out: the tensor to which ``result`` is added.
            result: the result of an expert.
            add: adds ``result`` to ``out`` as the loop does.
            unaffected_values: deferred values of the same statement, which need not be computed
                before the write.
        """
        x = result.rows.source
        fits = out.ndim > 1 and out.shape[-1] > 1 and out.shape[:-1].numel() == x.shape[:-1].numel()
        if not fits or (out.is_leaf and out.requires_grad):
            return False
        if memory_id(out) in result.memory_ids():
            return False  # the next expert takes what this one adds
        pending = self._pending
        if pending is not None and (pending.out is not out or pending.x is not x):
            self.flush()
        self.before_write(out, unaffected_values)
        if self._pending is None:
            self._pending = Addends(out, x, is_fresh=id(out) in self._created_tensors)
        self._pending.results.append(result)
        self._pending.adders.append(add)
        return True


def _grad_and_autocast() -> tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]:
    """Return (whether gradients are recorded, the settings of autocast) of this moment."""
    return torch.is_grad_enabled(), autocast.autocast_state()


# Functions whose result has the entries of their first argument, in the same order.
_ORDER_KEEPING = frozenset(
    "view reshape flatten ravel view_as reshape_as squeeze unsqueeze".split()
)

_DEFERRED_CALLS: dict[str, Callable[..., Any]] = {
    "where": Loop.where,
    "nonzero": Loop.nonzero,
    "__getitem__": Loop.get,
    "__setitem__": Loop.set,
    "mul": Loop.multiply,
    "index_add_": Loop.index_add,
}


def _memory_of_entry(entry: tuple[Any, Any]) -> set[int]:
    """Return identifiers of the memory of all tensors in ``entry``."""
    return set(map(memory_id, tensors_in(entry)))


def _writes_to_argument(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function of torch writes to an argument, as ``add_`` or ``out=`` does."""
    name = getattr(func, "__name__", "")
    in_place = (
        name.startswith("__i")
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
    )
    return in_place or kwargs.get("out") is not None
