"""Find out how the values of a collated batch depend on its items (their kinds).

The collate function runs on a rank's part of the items only. From the kind of a value in its result
the value in the whole batch follows:

```
items          a  b          made of a rank's part      kind       of the whole batch
images     [2, 3, 32, 32]    a tensor, dim 0 counts     PER_ITEM   [4, 3, 32, 32], global
names      ["a", "b"]        a list with one each       PER_ITEM   ["a", "b", "c", "d"]
size       2                 the number of items        COUNT      4
split      "train"           the same for any items     SAME       "train"
tokens     7                 anything else              OTHER      raises
```

The kind of a value is found by a second call of the function, with the items twice over. One call
is not enough: a list as long as the list of items may have one entry for each item, or be the
fields of a batch. The second call is made when new fields appear, which as a rule is in the first
batch. The results of torch's ``default_collate`` are known, and need no second call. All of this
may run in a worker process.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from .nested import Path, children, leaves

PER_ITEM, COUNT, SAME, OTHER = "per item", "count", "same", "other"
Kinds = Mapping[Path, str]


class Collated(NamedTuple):
    """A collated batch, and how each of its values depends on the items (its kind).

    Attributes:
        batch: what the collate function returned.
        kinds: path of a field -> PER_ITEM, COUNT, SAME or OTHER.
        unknown: why the kinds of fields that are not in ``kinds`` are not known; "" if nothing
            failed.
        divided: whether the batch was made of a part of the items, so that kinds matter.
    """

    batch: Any
    kinds: Kinds = {}
    unknown: str = ""
    divided: bool = True


class Collate:
    """Collate function that calls ``fn``, and finds out the kind of each value in its results.

    It replaces ``fn`` in the DataLoader of a rank that reads a part of each batch.
    """

    def __init__(self, fn: Callable[[list], Any]) -> None:
        self.fn = fn
        self.kinds: dict[Path, str] = {}
        self.unknown = ""

    def __call__(self, items: list) -> Collated:
        if self.fn is default_collate:
            batch = self.fn(items)
            return Collated(batch, kinds_of_default_collate(batch), "")
        is_first = not self.kinds and not self.unknown
        # Copied, since the function may modify the items, and the second call needs them again.
        original_items = self._copy_items(items) if is_first else items
        batch = self.fn(items)
        if is_first or any(
            path not in self.kinds for path, _ in leaves(batch, self._is_known_field)
        ):
            self._learn_kinds(batch, original_items)
        return Collated(batch, self.kinds, self.unknown)

    def _copy_items(self, items: list) -> list | None:
        try:
            return copy.deepcopy(items)
        except Exception as error:
            self.unknown = f"its items cannot be copied ({_error_text(error)})"
            return None

    def _learn_kinds(self, batch: Any, items: list | None) -> None:
        if items is None:
            return
        try:
            with _restored_random_states():
                doubled_batch = self.fn([*items, *copy.deepcopy(items)])
        except Exception as error:
            self.unknown = f"it raised for the same items twice over ({_error_text(error)})"
            return
        # A kind that is known already stays.
        self.kinds = {**find_kinds(batch, doubled_batch, len(items)), **self.kinds}

    def _is_known_field(self, path: Path, _: Any) -> bool:
        return path in self.kinds


def find_kinds(
    once: Any, twice: Any, count: int, path: Path = (), above: tuple[int, ...] = ()
) -> dict[Path, str]:
    """Return the kind of each value in ``once``, from how it differs from ``twice``.

    For example a list that is twice as long in ``twice`` has an entry for each item.

    Args:
        once: a result of the collate function for ``count`` items.
        twice: its result for these items twice over.
        count: the number of items.
        path: the path to ``once`` in the batch.
        above: the ids of the objects that contain ``once``.
    """
    if id(once) in above:
        return {path: OTHER}
    sizes = _length(once), _length(twice)
    if sizes == (count, 2 * count):
        return {path: PER_ITEM}
    if type(once) is not type(twice):
        return {path: OTHER}
    once_children, twice_children = children(once), children(twice)
    if once_children is None or twice_children is None:
        return {path: _kind_of_leaf(once, twice, count)}
    if once_children.keys() != twice_children.keys():
        return {path: OTHER}
    result = {}
    for key, x in once_children.items():
        result |= find_kinds(x, twice_children[key], count, (*path, key), (*above, id(once)))
    return result


def kinds_of_default_collate(batch: Any, path: Path = ()) -> dict[Path, str]:
    """Return the kinds of the values in ``batch``, a result of torch's ``default_collate``.

    All are PER_ITEM: it stacks numbers and tensors, and puts texts into lists. ``path`` is the path
    to ``batch`` in the whole.
    """
    values = children(batch)
    if values is None:
        return {path: PER_ITEM}
    if isinstance(batch, list | tuple) and any(isinstance(x, str | bytes) for x in batch):
        return {path: PER_ITEM}
    result = {}
    for key, x in values.items():
        result |= kinds_of_default_collate(x, (*path, key))
    return result


def comparable_text(x: Any) -> str:
    """Return a text that is equal for equal values ``x``, by which ranks compare them.

    It is ``repr(x)`` for numbers and texts, and contains a checksum for other objects.
    """
    if isinstance(x, Tensor) and not x.ndim:
        return repr(x.item())
    if x is None or isinstance(x, str | bytes | int | float | complex | np.generic | type):
        return repr(x)
    if isinstance(x, set | frozenset):
        return repr(sorted(map(comparable_text, x)))
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True  # no memo: equal values then have equal bytes, whatever objects they share
    try:
        pickler.dump(x)
    except Exception:  # such as an object that holds itself
        return type(x).__qualname__
    return f"{type(x).__qualname__}, checksum {zlib.crc32(buffer.getvalue()):#x}"


def as_int(x: Any) -> int | None:
    """Return ``x`` as an int if it is an integer, also as a 0-d tensor or array, otherwise None."""
    if isinstance(x, Tensor | np.ndarray) and not x.ndim:
        x = x.item()
    return int(x) if isinstance(x, int | np.integer) and not isinstance(x, bool) else None


def _kind_of_leaf(once: Any, twice: Any, count: int) -> str:
    if _length(once) is not None:  # a tensor or array whose dim 0 does not count items
        return OTHER
    if (as_int(once), as_int(twice)) == (count, 2 * count):
        return COUNT
    return SAME if comparable_text(once) == comparable_text(twice) else OTHER


def _length(x: Any) -> int | None:
    """Return the length of a tensor, array, list or tuple; None for anything else.

    Only these may have an entry for each item. Named tuples and 0-d tensors do not.
    """
    if isinstance(x, Tensor | np.ndarray):
        return len(x) if x.ndim else None
    return len(x) if isinstance(x, list | tuple) and not hasattr(x, "_fields") else None


@contextmanager
def _restored_random_states() -> Iterator[None]:
    """Context manager that restores the states of all random generators at its end.

    So the additional call of the collate function draws no numbers that the program would get.
    """
    numpy: Any = sys.modules["numpy"].random
    states = torch.get_rng_state(), random.getstate(), numpy.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.set_state(states[2])


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
