"""Guards: what a program was recorded with, and what is compared before each of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..dispatch.plans.shards import is_global
from .memory import extent, geometry
from .sources import ABSENT, Asked, Source, read

SIMPLE = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, complex)
_Off = torch._C.DisableTorchFunction
_T = torch.Tensor
_device = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class Guard(NamedTuple):
    """A place that holds a number, a word, or an object by which the program was recorded; or
    something that is asked of the store."""

    store: Any
    key: Any
    path: str
    value: Any

    def holds(self) -> bool:
        """Whether it is as it was: the same object, or the same number or word."""
        now = read(self.store, self.key)
        return now is self.value or same_value(now, self.value, self.is_asked)

    @property
    def is_asked(self) -> bool:
        """Whether it is not what is at a key, but something that is asked of the store."""
        return isinstance(self.key, Asked)


def same_value(now: Any, before: Any, by_value: bool = False) -> bool:
    """Whether both are the same number or word, or tuples of the same; other objects only
    ``by_value``."""
    if type(before) is tuple and type(now) is tuple and is_number(before):
        return len(now) == len(before) and all(map(same_value, now, before))
    by_value = by_value or isinstance(before, SIMPLE)
    return by_value and type(now) is type(before) and bool(now == before)


def is_number(x: Any) -> bool:
    """Whether ``x`` is a number or a word, or a tuple of them."""
    return all(map(is_number, x)) if type(x) is tuple else isinstance(x, SIMPLE)


class Guards:
    """All that a program depends on, compared before each run in as few calls as can be."""

    def __init__(
        self, guards: Sequence[Guard], sources: Sequence[Source], given: Sequence[torch.Tensor]
    ) -> None:
        self._sources = sources
        tensors = self._now()
        with _Off():
            self._likes = [_like(x) for x in tensors]
            self._shared = _sharing([*tensors, *given])
        # By how they are read: a call for each would take longer than to compare it.
        self._in_dicts: list[tuple[dict, Any, Any]] = []
        self._asked: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._others: list[Guard] = []
        self.add(guards)

    def add(self, guards: Sequence[Guard]) -> None:
        """Compare these, too."""
        for guard in guards:
            if guard.is_asked:
                self._asked.append((guard.key.ask, guard.store, guard.value))
            elif type(guard.store) is dict:
                self._in_dicts.append((guard.store, guard.key, guard.value))
            else:
                self._others.append(guard)

    def holds(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether guards hold, and sources hold tensors like those, which share memory as those."""
        for store, key, value in self._in_dicts:
            now = store.get(key, ABSENT)
            if now is not value and not same_value(now, value):
                return False
        for ask, store, value in self._asked:
            now = ask(store)
            if now is not value and not same_value(now, value, by_value=True):
                return False
        if not all(guard.holds() for guard in self._others):
            return False
        tensors = self._now()
        with _Off():
            if list(map(_like, tensors)) != self._likes:
                return False
            return _sharing([*tensors, *given]) == self._shared

    def _now(self) -> list[Any]:
        return [source.read() for source in self._sources]


def _sharing(tensors: list[Any]) -> list[int]:
    """For each source and argument, the first one in whose memory it lies.

    Parts of one memory that lie one behind the other share nothing: gradients that came in one
    message are such parts, and those of the next step need not be.
    """
    first: dict[int, int] = {}
    found, together = [], False
    for i, x in enumerate(tensors):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            found.append(first.setdefault(_T.untyped_storage(x)._cdata, i))
            together = together or found[i] != i
        else:
            found.append(-1)
    return _overlapping(tensors, found) if together else found


def _overlapping(tensors: list[Any], storages: list[int]) -> list[int]:
    """For each tensor the first one with which its bytes overlap, itself or through others."""
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for i, (x, storage) in enumerate(zip(tensors, storages, strict=True)):
        begin, end = extent(geometry(x)) if storage >= 0 else (0, 0)
        if begin < end:
            part = begin * x.element_size(), end * x.element_size(), i
            by_storage.setdefault(storage, []).append(part)
    found = [i if storage >= 0 else -1 for i, storage in enumerate(storages)]
    for parts in by_storage.values():
        groups: list[list[int]] = []
        reached = -1
        for begin, end, i in sorted(parts):
            if begin >= reached:
                groups.append([])
            groups[-1].append(i)
            reached = max(reached, end)
        for group in groups:
            for i in group:
                found[i] = min(group)
    return found


def _like(x: Any) -> Any:
    """The kind of a source's tensor: its layout, its size, and whether it requires grad."""
    if not isinstance(x, torch.Tensor):
        return None
    if x.layout is not torch.strided:
        return x.layout, x.shape, x.requires_grad
    spec = x._spec if is_global(x) else None  # type: ignore[attr-defined]
    return spec, _T.size(x), _T.stride(x), x.requires_grad, x.dtype, _device(x), x.grad_fn is None
