"""``torch.load`` of a file that anybody may have written.

``weights_only`` keeps it from running what the file says. It still makes what the file asks for:
memory of any size for some bytes. So the file is looked at before it is loaded, and what came out
before it is copied.
"""

from __future__ import annotations

import codecs
import io
import os
import pickletools
import zipfile
from contextlib import nullcontext
from typing import Any, BinaryIO

import torch

from mirrored.readable import is_utf8

from ...dispatch.plans.shards import is_global

_PICKLES_BEFORE_1_6 = 5  # magic number, version, system, what was saved, keys of its storages
_ALLOWED_GROWTH, _ALLOWED = 10, 64 << 20


def loaded(file: str | io.BytesIO) -> Any:
    """What a file of ``torch.save`` holds, tensors and values only, on the CPU; one that has a path
    is mapped into memory.

    Raises:
        ValueError: it is damaged, or holds anything else.
    """
    try:
        _look(file)
        mapped = isinstance(file, str) and is_utf8(file) and zipfile.is_zipfile(file)
        with open(file, "rb") if isinstance(file, str) else nullcontext(file) as held:
            given: Any = file if mapped else held
            return torch.load(given, map_location="cpu", weights_only=True, mmap=mapped)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a made-up file runs into any error of Python and torch
        text = str(error).partition("\n")[0]
        raise ValueError(text or type(error).__name__) from None


def _look(given: str | io.BytesIO) -> None:
    """Raise ValueError of what no ``torch.save`` writes and much memory is needed for."""
    file: Any = open(given, "rb") if isinstance(given, str) else given
    try:
        if zipfile.is_zipfile(file):
            _look_into_zip(file)
        else:
            file.seek(0)
            for _ in range(_PICKLES_BEFORE_1_6):
                _look_at_pickle(file)
    finally:
        file.close() if isinstance(given, str) else file.seek(0)


def _look_into_zip(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as held:
        entries = held.infolist()
        packed = any(e.compress_type or e.file_size != e.compress_size for e in entries)
        if packed or sum(e.file_size for e in entries) > size:
            raise ValueError("its parts are compressed, or lie in each other")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                _look_at_pickle(io.BytesIO(held.read(entry)))


def _look_at_pickle(file: Any) -> None:
    """Refuse the two calls that ``weights_only`` allows and that make much of a few bytes:
    ``bytearray`` of a number, and codecs from bytes to bytes, one on the result of another."""
    called, texts = set(), set()
    for opcode, told, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            called.add(told)
        elif isinstance(told, str) and len(told) < 40:
            texts.add(told)
    if called & {"builtins bytearray", "__builtin__ bytearray"}:
        raise ValueError("it makes a bytearray")
    if "_codecs encode" in called and any(map(_is_codec_of_bytes, texts)):
        raise ValueError("it encodes bytes")


def _is_codec_of_bytes(name: str) -> bool:
    try:
        return not codecs.lookup(name)._is_text_encoding
    except (LookupError, ValueError):
        return False


class Room:
    """How much of a file's tensors may be copied: a made-up file has one storage, and many tensors
    that are all of it, or one that repeats it.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._left = _ALLOWED_GROWTH * size + _ALLOWED

    def take(self, key: str, x: torch.Tensor) -> None:
        """Count a tensor.

        Raises:
            ValueError: it is not a plain dense one, or more than the file can be meant to hold.
        """
        if is_global(x):
            raise ValueError(
                f"{key} is the shard of a global tensor, which torch.load reads on the rank that "
                "saved it. checkpoint.save and save_full write what this reads."
            )
        if x.layout is not torch.strided or x.is_meta or x.is_quantized or x.is_nested:
            raise ValueError(f"{key} is not a dense tensor with values, and is not read here.")
        self._left -= x.numel() * x.element_size()
        if self._left < 0:
            raise ValueError(
                f"{key} and the tensors before it repeat the same bytes of the file more than "
                f"{_ALLOWED_GROWTH} times. Save them as the parts that differ."
            )
