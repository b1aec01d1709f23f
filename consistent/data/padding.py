"""Pad this rank's part of a batch to the longest items that any rank has read.

The fill value is given by ``pad=``. Otherwise it is what the tokenizer in the collate function pads
with, on the side on which the tokenizer pads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from .agreement import WHOLE, BatchNote
from .nested import Path, map_leaves, name_of

Pad = Mapping[str, float] | float | None


@dataclass(frozen=True)
class Padding:
    """How to pad: the fill value, one for all fields or one for each key of the batch.

    The fill value is put after the values of an item, or before them with ``front``.
    """

    values: Mapping[str, float] | float
    front: bool = False

    def fill_value(self, path: Path) -> float:
        """Return the fill value of the field at ``path``.

        Raises:
            ValueError: there is none.
        """
        if not isinstance(self.values, Mapping):
            return self.values
        for key in reversed(path):
            if key in self.values:
                return self.values[key]
        raise ValueError(
            f"data.loader: the parts of {name_of(path)} are of different lengths, and "
            f"pad={dict(self.values)} does not say what to pad it with. Add its key, or let every "
            f"rank collate the batch whole: both pad= and {WHOLE}."
        )


def padding_of(collate: Any, pad: Pad) -> Padding | None:
    """Return how to pad: with the values of ``pad``, and for keys that it lacks, as a tokenizer.

    ``pad`` is the argument of ``data.loader``. The tokenizer is looked for in the collate function
    ``collate``. Returns None if there is neither ``pad`` nor a tokenizer.
    """
    tokenizer = next(_tokenizers(collate, 3), None)
    front = getattr(tokenizer, "padding_side", "right") == "left"
    if pad is not None and not isinstance(pad, Mapping):
        return Padding(pad, front)
    if tokenizer is None:
        return None if pad is None else Padding(pad)
    return Padding({**_tokenizer_values(tokenizer, collate), **(pad or {})}, front)


def longest_sizes(notes: list[BatchNote]) -> dict[Path, tuple[int, ...]]:
    """Return, by path of the field, the sizes to which all ranks pad their items.

    In each dim it is the largest size of any rank, as their ``notes`` say.
    """
    sizes = {}
    for index, field in enumerate(notes[0].fields):
        sizes[field.path] = tuple(map(max, zip(*(note.fields[index].sizes for note in notes))))
    return sizes


def check_padding(notes: list[BatchNote], padding: Padding) -> None:
    """Raise ValueError, on every rank, if a field must be padded and has no fill value.

    A field must be padded if its sizes differ between the ranks' ``notes``.
    """
    for index, field in enumerate(notes[0].fields):
        if len({note.fields[index].sizes for note in notes}) > 1:
            padding.fill_value(field.path)


def pad_batch(batch: Any, sizes: Mapping[Path, tuple[int, ...]], padding: Padding) -> Any:
    """Return the batch with the dims of each item filled up to ``sizes``.

    ``sizes`` is the result of ``longest_sizes``. A field of shape (2, 5) whose sizes are (7,)
    becomes one of shape (2, 7).
    """

    def fill(path: Path, x: Any) -> Any:
        if not isinstance(x, Tensor | np.ndarray) or not x.ndim or path not in sizes:
            return x
        missing = [want - has for want, has in zip(sizes[path], x.shape[1:], strict=True)]
        if not any(missing):
            return x
        sides = [(n, 0) if padding.front else (0, n) for n in missing]
        value: Any = padding.fill_value(path)
        if isinstance(x, Tensor):
            # F.pad takes the sides of the last dim first.
            return F.pad(x, [n for side in reversed(sides) for n in side], value=value)
        return np.pad(x, [(0, 0), *sides], constant_values=value)

    return map_leaves(fill, batch)


def _tokenizer_values(tokenizer: Any, collate: Any) -> dict[str, float]:
    """Return, by key of the batch, the values with which the collators of transformers pad."""
    ids = tokenizer.pad_token_id
    labels = getattr(collate, "label_pad_token_id", -100)
    values = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": 0,
        "decoder_attention_mask": 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "special_tokens_mask": 1,
        "labels": labels,
    }
    return {key: value for key, value in values.items() if value is not None}


def _tokenizers(x: Any, depth: int) -> Iterator[Any]:
    """Yield the tokenizers that can be reached from a collate function ``x``.

    ``x`` may be a method of a tokenizer, have one as an attribute, or refer to one by a global or
    closure variable. Such references are followed at most ``depth`` times.
    """
    if callable(getattr(type(x), "pad", None)) and isinstance(
        getattr(x, "pad_token_id", None), int
    ):
        yield x
    elif depth and not isinstance(x, type | ModuleType | Tensor):
        for reference in _referenced_objects(x):
            yield from _tokenizers(reference, depth - 1)


def _referenced_objects(x: Any) -> list[Any]:
    """Return the objects that ``x`` refers to by its arguments, variables or attributes."""
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if inspect.ismethod(x):
        return [x.__self__]
    if inspect.isfunction(x):
        return _function_references(x)
    if isinstance(x, Mapping | list | tuple | set):
        return []
    call_method: Callable[..., Any] | None = getattr(type(x), "__call__", None)  # noqa: B004
    referenced = _function_references(call_method) if inspect.isfunction(call_method) else []
    return [*getattr(x, "__dict__", {}).values(), *referenced]


def _function_references(fn: Any) -> list[Any]:
    """Return the values of the globals, closure variables and default arguments of a function."""
    closure = inspect.getclosurevars(fn)
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return [*closure.nonlocals.values(), *closure.globals.values(), *defaults]
