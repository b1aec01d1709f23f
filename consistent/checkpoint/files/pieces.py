"""Data files: pieces of tensors in the format of safetensors, and the checksums of the pieces.

```
| 8 bytes: length of the header | header: JSON, name -> dtype, shape, place | piece | piece | ...
                                                                              \\___/
                                                         a checksum for each block of 4 MiB of it
```

Any tool that reads safetensors can show what a file contains. The checksums are in the index of the
checkpoint (``index.py``): a reader verifies the blocks that it reads, and no others.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

BLOCK = 4 << 20  # bytes that have one checksum

# Names of dtypes in safetensors files; tensors of other dtypes are written as bytes.
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}  # fmt: skip


@dataclass(frozen=True)
class Location:
    """Location of a piece of a tensor in a data file.

    It is the file's name, the offset of the first byte, the number of bytes, and a CRC-32 for each
    block of 4 MiB.
    """

    file: str
    at: int
    nbytes: int
    checksums: tuple[int, ...] | None  # None: the file has none


def bytes_of(x: torch.Tensor) -> memoryview:
    """Return the elements of a plain tensor as bytes, in row-major order."""
    flat = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def header_of(pieces: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, and the JSON text.

    ``pieces`` are (name, dtype, shape) of the file's tensors, in order. A dtype that the format
    does not have is written as bytes ("U8").
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in pieces:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        stored_shape = list(shape) if dtype in DTYPE_NAMES else [end - start]
        header[name] = {
            "dtype": DTYPE_NAMES.get(dtype, "U8"),
            "shape": stored_shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pieces begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def write(path: str, pieces: Sequence[tuple[str, torch.Tensor]]) -> list[Location]:
    """Write (name, plain tensor) pairs into a safetensors file; return their locations in order.

    Returns once the file is on disk. In the file, tensors with the largest elements come first, so
    that each one starts at a multiple of its element size.
    """
    order = sorted(range(len(pieces)), key=lambda k: -pieces[k][1].element_size())
    places: dict[int, Location] = {}
    with open(path, "wb", buffering=0) as file:
        write_all(
            file, header_of([(pieces[k][0], pieces[k][1].dtype, pieces[k][1].shape) for k in order])
        )
        for k in order:
            at, data = file.tell(), bytes_of(pieces[k][1])
            checksums = []
            for block in blocks_of(data):
                checksums.append(zlib.crc32(block))
                write_all(file, block)
            places[k] = Location(os.path.basename(path), at, len(data), tuple(checksums))
        os.fsync(file.fileno())
    return [places[k] for k in range(len(pieces))]


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of ``data`` to an unbuffered file, which may accept less in one call."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Split ``data`` into blocks of ``BLOCK`` bytes; the last one may be shorter."""
    return (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def read(
    file: BinaryIO,
    where: Location,
    dtype: torch.dtype,
    shape: Sequence[int],
    box: tuple[Sequence[int], Sequence[int]],
) -> torch.Tensor:
    """Read the part ``box`` (starts, sizes) of the piece at ``where`` from the open ``file``.

    ``dtype`` and ``shape`` are those of the piece. Only the blocks that contain the box are read,
    and their checksums verified.

    Raises:
        ValueError: the file is too short, or its bytes are not those that were written.
    """
    starts, sizes = box
    if 0 in sizes:
        return torch.empty(list(sizes), dtype=dtype)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(a * s for a, s in zip(starts, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    # Whole blocks are read, since a checksum covers a whole block.
    begin = first * dtype.itemsize // BLOCK * BLOCK
    end = min(-(-(last + 1) * dtype.itemsize // BLOCK) * BLOCK, where.nbytes)
    data = _read_verified(file, where, begin, end)
    flat = torch.frombuffer(data, dtype=dtype)
    # A view of the bytes that were read, in which the rows of the box need not be adjacent.
    return flat.as_strided(list(sizes), strides, first - begin // dtype.itemsize)


def _read_verified(file: BinaryIO, where: Location, begin: int, end: int) -> bytearray:
    """Read the bytes of a piece from ``begin`` to ``end``, and verify their checksums.

    Both count from the start of the piece. ``begin`` is the start of a block, ``end`` the end of
    one.
    """
    data = bytearray(end - begin)
    file.seek(where.at + begin)
    rest = memoryview(data)
    while len(rest):
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise ValueError(
                f"{file.name} ends {len(rest)} bytes before the piece at {where.at} does, so it "
                "was cut off. Take an earlier checkpoint."
            )
        rest = rest[count:]
    if where.checksums is not None:
        for k, block in enumerate(blocks_of(memoryview(data)), begin // BLOCK):
            if zlib.crc32(block) != where.checksums[k]:
                raise ValueError(
                    f"{file.name}: the bytes from {where.at + k * BLOCK} on are not those that "
                    "were written (their checksum differs), so the file was damaged. Take an "
                    "earlier checkpoint."
                )
    return data
