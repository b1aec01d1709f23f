"""Checks of the sizes, shapes and types that a file claims, before anything is built from them.

The file may come from anybody.
"""

from __future__ import annotations

import json
import math
import os
import stat
from typing import Any, BinaryIO

import torch

DTYPES: dict[str, torch.dtype] = {  # "float32" -> torch.float32; getattr(torch, name) may import
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}
MAX_LEVELS = 300  # of nested lists and objects, so that recursive readers do not overflow
_TOO_DEEP = f"it is nested deeper than {MAX_LEVELS} levels"
_MAX_DIMS = 64  # as in torch
_MAX_ELEMENTS = 1 << 60  # elements of a tensor: no size computed from them overflows


def open_plain_file(path: str) -> BinaryIO:
    """Open a plain file for reading. Pipes and devices are refused: reading them may never end.

    Raises:
        ValueError: ``path`` is not a plain file.
    """
    file = open(path, "rb", buffering=0, opener=_open_nonblocking)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a file, but a folder, a pipe or a device. Remove it.")
    return file  # type: ignore[return-value]


# Without O_NONBLOCK, opening a pipe would block until another process opens it for writing.
def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: str) -> bytes:
    """Return all bytes of the plain file ``path``."""
    with open_plain_file(path) as file:
        return file.read()


def check_number(value: Any, what: str) -> int:
    """Return ``value`` if it is a valid number of bytes or items: an int from 0 to 2 ** 60.

    ``what`` names it in the error.

    Raises:
        ValueError: ``value`` is not such a number.
    """
    # The exact type, because a bool is an int as well.
    if type(value) is not int or not 0 <= value <= _MAX_ELEMENTS:
        raise ValueError(f"{what} is not a number of 0 or more")
    return value


def check_shape(value: Any, what: str) -> tuple[int, ...]:
    """Return ``value``, a list or tuple of sizes, as a tuple; ``what`` names it in the error.

    Raises:
        ValueError: ``value`` is not a valid shape.
    """
    if not isinstance(value, list | tuple) or len(value) > _MAX_DIMS:
        raise ValueError(f"{what} is not a list of at most {_MAX_DIMS} sizes")
    sizes = tuple(check_number(n, f"a size of {what}") for n in value)
    # A size of 0 must not hide an overflow by the others.
    if math.prod(max(n, 1) for n in sizes) > _MAX_ELEMENTS:
        raise ValueError(f"{what} is of more elements than a tensor can have")
    return sizes


def check_dtype(name: Any) -> torch.dtype:
    """Return the torch dtype called ``name``, such as ``"float32"``.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{str(name)[:40]!r} is not a dtype")
    return DTYPES[name]


def check_type(kind: type, value: Any, what: str) -> Any:
    """Return ``value`` if its type is exactly ``kind``; ``what`` names it in the error.

    Raises:
        ValueError: ``value`` has another type.
    """
    if type(value) is not kind:
        raise ValueError(f"{what} is a {type(value).__name__}, and not a {kind.__name__}")
    return value


def parse_json(text: bytes | memoryview) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, repeats a key in an object, or is nested deeper than
            ``MAX_LEVELS`` levels.
    """
    try:
        value = json.loads(bytes(text), object_pairs_hook=_dict_without_duplicates)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value] if isinstance(value, dict | list) else []
    # Counted level by level, without recursion.
    for _ in range(MAX_LEVELS):
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        level = [x for each in inside for x in each if isinstance(x, dict | list)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{duplicate[:80]!r} stands there twice")
    return result
