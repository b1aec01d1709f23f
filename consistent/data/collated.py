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
does not tell: a list as long as the list of items may have one entry for each item, or be the
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
            return Collated(batch, of_default(batch), "")
        first = not self.kinds and not self.unknown
        # Copied, since the function may modify the items, and the second call needs them again.
        before = self._copies(items) if first else items
        batch = self.fn(items)
        if first or any(path not in self.kinds for path, _ in leaves(batch, self._stops)):
            self._learn(batch, before)
        return Collated(batch, self.kinds, self.unknown)

    def _copies(self, items: list) -> list | None:
        try:
            return copy.deepcopy(items)
        except Exception as error:
            self.unknown = f"its items cannot be copied ({_words(error)})"
            return None

    def _learn(self, batch: Any, items: list | None) -> None:
        if items is None:
            return
        try:
            with _same_numbers():
                twice = self.fn([*items, *copy.deepcopy(items)])
        except Exception as error:
            self.unknown = f"it raised for the same items twice over ({_words(error)})"
            return
        # A kind that is known already stays.
        self.kinds = {**kinds(batch, twice, len(items)), **self.kinds}

    def _stops(self, path: Path, _: Any) -> bool:
        return path in self.kinds


def kinds(
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
    inside, other = children(once), children(twice)
    if inside is None or other is None:
        return {path: _of_leaf(once, twice, count)}
    if inside.keys() != other.keys():
        return {path: OTHER}
    found = {}
    for key, x in inside.items():
        found |= kinds(x, other[key], count, (*path, key), (*above, id(once)))
    return found


def of_default(batch: Any, path: Path = ()) -> dict[Path, str]:
    """Return the kinds of the values in ``batch``, a result of torch's ``default_collate``.

    All are PER_ITEM: it stacks numbers and tensors, and puts texts into lists. ``path`` is the path
    to ``batch`` in the whole.
    """
    inside = children(batch)
    if inside is None:
        return {path: PER_ITEM}
    if isinstance(batch, list | tuple) and any(isinstance(x, str | bytes) for x in batch):
        return {path: PER_ITEM}
    found = {}
    for key, x in inside.items():
        found |= of_default(x, (*path, key))
    return found


def fact(x: Any) -> str:
    """Return a text that is equal for equal values ``x``, by which ranks compare them.

    It is ``repr(x)`` for numbers and texts, and contains a checksum for other objects.
    """
    if isinstance(x, Tensor) and not x.ndim:
        return repr(x.item())
    if x is None or isinstance(x, str | bytes | int | float | complex | np.generic | type):
        return repr(x)
    if isinstance(x, set | frozenset):
        return repr(sorted(map(fact, x)))
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.fast = True  # no memo: equal values then have equal bytes, whatever objects they share
    try:
        pickler.dump(x)
    except Exception:  # such as an object that holds itself
        return type(x).__qualname__
    return f"{type(x).__qualname__}, checksum {zlib.crc32(written.getvalue()):#x}"


def number(x: Any) -> int | None:
    """Return ``x`` as an int if it is an integer, also as a 0-d tensor or array, otherwise None."""
    if isinstance(x, Tensor | np.ndarray) and not x.ndim:
        x = x.item()
    return int(x) if isinstance(x, int | np.integer) and not isinstance(x, bool) else None


def _of_leaf(once: Any, twice: Any, count: int) -> str:
    if _length(once) is not None:  # a tensor or array whose dim 0 does not count items
        return OTHER
    if (number(once), number(twice)) == (count, 2 * count):
        return COUNT
    return SAME if fact(once) == fact(twice) else OTHER


def _length(x: Any) -> int | None:
    """Return the length of a tensor, array, list or tuple; None for anything else.

    Only these may have an entry for each item. Named tuples and 0-d tensors do not.
    """
    if isinstance(x, Tensor | np.ndarray):
        return len(x) if x.ndim else None
    return len(x) if isinstance(x, list | tuple) and not hasattr(x, "_fields") else None


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Context manager that restores the states of all random generators at its end.

    So the additional call of the collate function draws no numbers that the program would get.
    """
    numpy: Any = sys.modules["numpy"].random
    before = torch.get_rng_state(), random.getstate(), numpy.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        numpy.set_state(before[2])


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
