"""Conversion of values that are not tensors to JSON and back, without pickle.

A type that JSON does not have becomes an object with one key that begins with ``$``: ``(1, 2)`` is
``{"$tuple": [1, 2]}``, and a tensor is ``{"$tensor": "model.weight"}``, with its name among the
tensors of the checkpoint. Decoding creates objects of the types listed here and no others.
"""

from __future__ import annotations

import base64
import collections
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from . import checked

KeyPath = tuple[str, ...]
_MAX_LEVELS = checked.MAX_LEVELS // 3  # one level of a value is up to three levels of JSON
_FACTORIES = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "None": None}
_ARRAY_KINDS = "biufcSU"  # numpy's bool, numbers and texts: dtypes whose bytes are the values


def encode(value: Any, path: KeyPath, name_of: Callable[[torch.Tensor, KeyPath], str]) -> Any:
    """Return ``value`` in a form that ``json`` can write, with tensors represented by names.

    ``name_of`` is called with each tensor and the path of keys that leads to it, and returns its
    name.

    Raises:
        TypeError: ``value`` contains an object that cannot be encoded, such as one of a class of
            the program.
        ValueError: ``value`` is nested too deeply to be read again.
    """

    def inner(each: Any, *more: Any) -> Any:
        return encode(each, (*path, *map(str, more)), name_of)

    kind = type(value)
    if len(path) > _MAX_LEVELS:
        raise ValueError(
            f"{'.'.join(path)[:80]}... is nested deeper than {_MAX_LEVELS} levels, which is read "
            "from no file. Give it in fewer."
        )
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": name_of(value, path)}
    if kind is float:
        # JSON has no infinities and NaN.
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [inner(each, k) for k, each in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, inner, name_of)
    return _encode_other(value, path, inner)


def _encode_mapping(
    value: Any,
    path: KeyPath,
    inner: Callable[..., Any],
    name_of: Callable[[torch.Tensor, KeyPath], str],
) -> Any:
    kind = type(value)
    # Other keys, and those that begin with $, need the form with pairs below.
    if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
        return {
            k: {"$tensor": name_of(each, (*path, k))} if isinstance(each, torch.Tensor)
            else inner(each, k)
            for k, each in value.items()
        }  # fmt: skip
    items = [[inner(k), inner(each, k)] for k, each in value.items()]
    if kind is collections.OrderedDict:
        return {"$ordered": items}
    if kind is collections.Counter:
        return {"$counter": items}
    if kind is collections.defaultdict:
        name = getattr(value.default_factory, "__name__", "None")
        if _FACTORIES.get(name, ...) is not value.default_factory:
            raise _unsupported_error(value, path)
        return {"$default": [name, items]}
    return {"$dict": items}


def _encode_other(value: Any, path: KeyPath, inner: Callable[..., Any]) -> Any:
    if type(value) is tuple:
        if all(type(each) is int for each in value):  # fast path for long random states
            return {"$tuple": list(value)}
        return {"$tuple": [inner(each, k) for k, each in enumerate(value)]}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, set | frozenset):
        tag = "$set" if isinstance(value, set) else "$frozenset"
        return {tag: sorted((inner(v) for v in value), key=repr)}  # the same text on every rank
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [inner(value.real), inner(value.imag)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"$" + type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAY_KINDS:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {tag: [value.dtype.str, list(value.shape), data]}
    bases: tuple[Any, ...] = (int, float, str, tuple)
    for base in bases:  # subclasses, such as an IntEnum or a named tuple, lose their class
        if isinstance(value, base):
            return inner(base(value))
    raise _unsupported_error(value, path)


def _unsupported_error(value: Any, path: KeyPath) -> TypeError:
    return TypeError(
        f"{'.'.join(path) or 'a value'} is a {type(value).__module__}.{type(value).__qualname__}, "
        "which files without pickle do not hold. They hold tensors, numpy arrays, numbers, texts, "
        "bytes, None, and lists, tuples, sets and dictionaries of them; give it as those, for "
        "example by its state_dict()."
    )


def decode(text: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the value that ``encode`` turned into ``text``, which is parsed JSON.

    ``tensor(name)`` is called for each tensor in the value, and returns what to put there.

    Raises:
        ValueError: ``encode`` cannot have made ``text``.
    """
    if isinstance(text, list):
        return [decode(each, tensor) for each in text]
    if not isinstance(text, dict):
        return text
    if len(text) == 1:
        ((tag, inner),) = text.items()
        if tag == "$tensor" and isinstance(inner, str):
            return tensor(inner)
        if tag.startswith("$"):
            try:
                return _DECODERS[tag](inner, lambda each: decode(each, tensor))
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(f"{tag} with {reprlib.repr(inner)} is not a value") from error
    return {k: decode(each, tensor) for k, each in text.items()}


def _decoded_pairs(items: Any, inner: Callable[[Any], Any]) -> Any:
    return ((inner(k), inner(v)) for k, v in items)


def _decode_array(encoded: Any) -> np.ndarray:
    dtype, shape, data = encoded
    if np.dtype(dtype).kind not in _ARRAY_KINDS:
        raise ValueError(f"numpy's {dtype} is not one of numbers or texts")
    # Copied, because an array over bytes is read-only.
    return np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).reshape(shape).copy()


_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$array": lambda x, _: _decode_array(x),
    "$bytes": lambda x, _: base64.b64decode(x, validate=True),
    "$complex": lambda x, inner: complex(*map(inner, x)),
    "$counter": lambda x, inner: collections.Counter(dict(_decoded_pairs(x, inner))),
    "$default": lambda x, inner: collections.defaultdict(
        _FACTORIES[x[0]], _decoded_pairs(x[1], inner)
    ),
    "$device": lambda x, _: torch.device(x),
    "$dict": lambda x, inner: dict(_decoded_pairs(x, inner)),
    "$dtype": lambda x, _: checked.check_dtype(x),
    "$float": lambda x, _: float(x),
    "$frozenset": lambda x, inner: frozenset(map(inner, x)),
    "$ordered": lambda x, inner: collections.OrderedDict(_decoded_pairs(x, inner)),
    "$path": lambda x, _: Path(x),
    "$scalar": lambda x, _: _decode_array(x)[()],
    "$set": lambda x, inner: set(map(inner, x)),
    "$size": lambda x, _: torch.Size(x),
    "$tuple": lambda x, inner: tuple(map(inner, x)),
}


def tensors_in(text: Any) -> list[str]:
    """Return the names of the tensors in the encoded value ``text``, in order."""
    names: list[str] = []
    decode(text, names.append)
    return names
