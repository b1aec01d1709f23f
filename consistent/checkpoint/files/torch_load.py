"""A safe ``torch.load``, for a file that may come from anybody.

``weights_only`` prevents the file from running code. But a few bytes of a file can still make torch
allocate memory of any size. So the file is inspected before it is loaded, and its tensors are
counted before they are copied (``SizeLimit``).
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

# A file of torch before 1.6 is five pickles: magic number, version, system, the saved object, and
# the keys of its storages.
_PICKLES_BEFORE_1_6 = 5
_ALLOWED_GROWTH, _ALLOWED_BYTES = 10, 64 << 20  # copies: up to 10 times the file's size + 64 MiB


def load_safely(file: str | io.BytesIO) -> Any:
    """Load a ``torch.save`` file that contains tensors and values only, to the CPU.

    A file given by its path is mapped into memory where that is possible.

    Raises:
        ValueError: the file is damaged, or contains anything else.
    """
    try:
        _check_file(file)
        mapped = isinstance(file, str) and is_utf8(file) and zipfile.is_zipfile(file)
        with open(file, "rb") if isinstance(file, str) else nullcontext(file) as stream:
            source: Any = file if mapped else stream
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a made-up file runs into any error of Python and torch
        text = str(error).partition("\n")[0]
        raise ValueError(text or type(error).__name__) from None


def _check_file(source: str | io.BytesIO) -> None:
    """Raise ValueError if loading a file could fill memory, although the file is small.

    That takes content that ``torch.save`` never writes, such as compressed parts.
    """
    file: Any = open(source, "rb") if isinstance(source, str) else source
    try:
        if zipfile.is_zipfile(file):
            _check_zip(file)
        else:
            file.seek(0)
            for _ in range(_PICKLES_BEFORE_1_6):
                _check_pickle(file)
    finally:
        file.close() if isinstance(source, str) else file.seek(0)


def _check_zip(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        is_compressed = any(e.compress_type or e.file_size != e.compress_size for e in entries)
        if is_compressed or sum(e.file_size for e in entries) > size:
            raise ValueError("its parts are compressed, or lie in each other")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                _check_pickle(io.BytesIO(archive.read(entry)))


def _check_pickle(file: Any) -> None:
    """Raise ValueError if a pickle has calls that make large objects from few bytes.

    torch's ``weights_only`` allows two such calls: ``bytearray(n)``, and nested codecs that expand
    bytes, such as a decompression.
    """
    global_names, texts = set(), set()
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            global_names.add(argument)
        elif isinstance(argument, str) and len(argument) < 40:
            texts.add(argument)
    if global_names & {"builtins bytearray", "__builtin__ bytearray"}:
        raise ValueError("it makes a bytearray")
    if "_codecs encode" in global_names and any(map(_is_codec_of_bytes, texts)):
        raise ValueError("it encodes bytes")


def _is_codec_of_bytes(name: str) -> bool:
    try:
        return not codecs.lookup(name)._is_text_encoding
    except (LookupError, ValueError):
        return False


class SizeLimit:
    """Limit on the total bytes of the tensors of one file: ten times its size plus 64 MiB.

    A forged file may have one storage and many tensors that each cover all of it, or a tensor that
    repeats it by a stride of 0. Copying these would fill memory.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._remaining_bytes = _ALLOWED_GROWTH * size + _ALLOWED_BYTES

    def count(self, key: str, x: torch.Tensor) -> None:
        """Count the bytes of the tensor ``x``, named ``key``, against the limit.

        Raises:
            ValueError: the tensor is not a plain dense one, or the limit is exceeded.
        """
        if is_global(x):
            raise ValueError(
                f"{key} is the shard of a global tensor, which torch.load reads on the rank that "
                "saved it. checkpoint.save and save_full write what this reads."
            )
        if x.layout is not torch.strided or x.is_meta or x.is_quantized or x.is_nested:
            raise ValueError(f"{key} is not a dense tensor with values, and is not read here.")
        self._remaining_bytes -= x.numel() * x.element_size()
        if self._remaining_bytes < 0:
            raise ValueError(
                f"{key} and the tensors before it repeat the same bytes of the file more than "
                f"{_ALLOWED_GROWTH} times. Save them as the parts that differ."
            )
