"""The tensors in a batch, which may be a tensor or any nesting of mappings, lists and tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]  # keys and positions that lead to a tensor


def tensors(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """(path, tensor) of each tensor."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield from tensors(batch[key], (*path, key))
    elif isinstance(batch, list | tuple):
        for index, each in enumerate(batch):
            yield from tensors(each, (*path, index))


def mapped(fn: Callable[[Path, Tensor], Any], batch: Any, path: Path = ()) -> Any:
    """A copy of the containers with ``fn(path, tensor)`` in place of each tensor. All else stays
    the object that it is."""
    if isinstance(batch, Tensor):
        return fn(path, batch)
    if isinstance(batch, Mapping):
        made = {key: mapped(fn, batch[key], (*path, key)) for key in batch}
        if isinstance(batch, MutableMapping):  # keeps its class and attributes
            clone = copy.copy(batch)
            clone.update(made)
            return clone
        return made
    if isinstance(batch, list | tuple):
        items = [mapped(fn, each, (*path, index)) for index, each in enumerate(batch)]
        if hasattr(batch, "_fields"):
            return type(batch)(*items)
        return type(batch)(items) if type(batch) in (list, tuple) else items
    return batch


def name_of(path: Path) -> str:
    """``batch["x"][0]``."""
    return "batch" + "".join(f"[{key!r}]" for key in path)
