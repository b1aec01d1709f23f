"""Guards of a program: the state on which its recording depended, compared before each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..dispatch.plans.shards import is_global
from .memory import extent, geometry
from .sources import ABSENT, FunctionKey, Source, read

SIMPLE_TYPES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, complex)
_DisableTorchFunction = torch._C.DisableTorchFunction
_T = torch.Tensor
_device = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class Guard(NamedTuple):
    """One condition under which a program is valid: a value that Python keeps is still as recorded.

    Example: ``Guard(vars(model), "training", "model.training", True)``.

    Args:
        store, key: where the value is, such as a dict and its key. If ``key`` is a ``FunctionKey``,
            the value is what its function returns for the store, such as a length.
        path: name of the value in messages.
        value: number, string or object that was recorded.
    """

    store: Any
    key: Any
    path: str
    value: Any

    def holds(self) -> bool:
        """Return whether the value is still the same object, or an equal number or string."""
        now = read(self.store, self.key)
        return now is self.value or same_value(now, self.value, self.is_function_guard)

    @property
    def is_function_guard(self) -> bool:
        """Return whether a ``FunctionKey`` computes the value, instead of reading it at a key."""
        return isinstance(self.key, FunctionKey)


def same_value(now: Any, before: Any, by_value: bool = False) -> bool:
    """Return whether both are the same number or string, or tuples of them.

    The types must be equal too: 1 and 1.0 are not the same. Other objects are compared, by ``==``,
    only with ``by_value``; without it they count as different.
    """
    if type(before) is tuple and type(now) is tuple and is_simple_value(before):
        return len(now) == len(before) and all(map(same_value, now, before))
    by_value = by_value or isinstance(before, SIMPLE_TYPES)
    return by_value and type(now) is type(before) and bool(now == before)


def is_simple_value(x: Any) -> bool:
    """Return whether ``x`` is a number, string or other simple value, or a tuple of these.

    Guards compare such values by ``==``, and other objects by identity.
    """
    return all(map(is_simple_value, x)) if type(x) is tuple else isinstance(x, SIMPLE_TYPES)


class Guards:
    """All guards of one program, compared before each run in as few Python calls as possible.

    Args:
        guards: conditions on numbers, strings and the identity of objects.
        sources: the places (attributes, ``param.grad`` and so on) that hold the tensors of the
            step.
        given: the tensors among the arguments of the recorded call.
    """

    def __init__(
        self, guards: Sequence[Guard], sources: Sequence[Source], given: Sequence[torch.Tensor]
    ) -> None:
        self._sources = sources
        tensors = self._read_sources()
        with _DisableTorchFunction():
            self._metadata = [_tensor_metadata(x) for x in tensors]
            self._recorded_sharing = _memory_sharing([*tensors, *given])
        # Grouped by how they are read: a method call for each guard would take longer than the
        # comparison.
        self._dict_guards: list[tuple[dict, Any, Any]] = []
        self._function_guards: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._other_guards: list[Guard] = []
        self.add(guards)

    def add(self, guards: Sequence[Guard]) -> None:
        """Add guards, which are compared before each run as well."""
        for guard in guards:
            if guard.is_function_guard:
                self._function_guards.append((guard.key.function, guard.store, guard.value))
            elif type(guard.store) is dict:
                self._dict_guards.append((guard.store, guard.key, guard.value))
            else:
                self._other_guards.append(guard)

    def holds(self, given: Sequence[torch.Tensor]) -> bool:
        """Return whether the program is valid for the present state and the arguments ``given``.

        All guards must hold. The parameters, gradients and other tensors of the step must have the
        same layouts, sizes and dtypes as in the recording, and share memory in the same way.
        """
        for store, key, value in self._dict_guards:
            now = store.get(key, ABSENT)
            if now is not value and not same_value(now, value):
                return False
        for ask, store, value in self._function_guards:
            now = ask(store)
            if now is not value and not same_value(now, value, by_value=True):
                return False
        if not all(guard.holds() for guard in self._other_guards):
            return False
        tensors = self._read_sources()
        with _DisableTorchFunction():
            if list(map(_tensor_metadata, tensors)) != self._metadata:
                return False
            return _memory_sharing([*tensors, *given]) == self._recorded_sharing

    def _read_sources(self) -> list[Any]:
        return [source.read() for source in self._sources]


def _memory_sharing(tensors: list[Any]) -> list[int]:
    """Return which tensors share memory: for each, the index of the first one that it overlaps.

    Example: ``[a, b, a[1:]]`` gives [0, 1, 0]. What is no strided tensor gets -1. Disjoint parts of
    one storage count as not shared: gradients that arrived in one message are such parts, and the
    gradients of the next step need not be.
    """
    first_by_storage: dict[int, int] = {}
    first_indices, has_shared_storage = [], False
    for i, x in enumerate(tensors):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            first_indices.append(first_by_storage.setdefault(_T.untyped_storage(x)._cdata, i))
            # Only if two tensors have one storage is the slower comparison of their bytes needed.
            has_shared_storage = has_shared_storage or first_indices[i] != i
        else:
            first_indices.append(-1)
    return _first_overlapping(tensors, first_indices) if has_shared_storage else first_indices


def _first_overlapping(tensors: list[Any], storages: list[int]) -> list[int]:
    """Return for each tensor the index of the first tensor whose bytes it overlaps.

    Overlaps through further tensors count too. ``storages`` has for each tensor the index of the
    first one with the same storage, or -1 for what is no strided tensor.
    """
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for i, (x, storage) in enumerate(zip(tensors, storages, strict=True)):
        begin, end = extent(geometry(x)) if storage >= 0 else (0, 0)
        if begin < end:
            span = begin * x.element_size(), end * x.element_size(), i
            by_storage.setdefault(storage, []).append(span)
    first_indices = [i if storage >= 0 else -1 for i, storage in enumerate(storages)]
    for spans in by_storage.values():
        groups: list[list[int]] = []
        group_end = -1
        for begin, end, i in sorted(spans):
            if begin >= group_end:
                groups.append([])
            groups[-1].append(i)
            group_end = max(group_end, end)
        for group in groups:
            for i in group:
                first_indices[i] = min(group)
    return first_indices


def _tensor_metadata(x: Any) -> Any:
    """Return the properties of a tensor that a program depends on, for comparison by ``==``.

    These are its layout, size and strides, dtype, device, and whether it requires grad and is a
    leaf.
    """
    if not isinstance(x, torch.Tensor):
        return None
    if x.layout is not torch.strided:
        return x.layout, x.shape, x.requires_grad
    spec = x._spec if is_global(x) else None  # type: ignore[attr-defined]
    return spec, _T.size(x), _T.stride(x), x.requires_grad, x.dtype, _device(x), x.grad_fn is None
