"""The index of a checkpoint: one JSON file that says what the data files hold.

It has a checksum of its own. It is written last, and the folder gets its name after that, so a
folder with an index is whole. In memory the tensors are the ``Metadata`` of
``torch.distributed.checkpoint``, as in checkpoints of any other format.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .pieces import Where

NAME = "checkpoint.json"
_HEAD = re.compile(
    r'\{"format": "consistent.checkpoint", "version": (\d+), "serial": (\d+), "crc32": (\d+), '
    r'"body": '
)
_VERSION = 1


@dataclass
class Index:
    """What a checkpoint holds.

    ``kinds``: name given to ``save`` -> what it was ("module", "optimizer", "state", "value"; of
    other formats "tensor" too, which may be a module's).
    ``values``: name -> its value as ``values.encode`` writes it, alike on all ranks; or, for a name
    in ``differing``, a list with one value a rank.
    ``tensors`` has ``storage_data`` too: piece -> ``Where``. ``aliases``: a tensor's other name ->
    its name.
    """

    tensors: Metadata
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    step: int | None = None
    serial: int = 0
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes


def write(path: str, index: Index) -> None:
    """Write the index and wait until it is on the disk."""
    body = json.dumps(
        {
            "step": index.step,
            "ranks": index.ranks,
            "files": index.files,
            "kinds": index.kinds,
            "values": index.values,
            "differing": index.differing,
            "aliases": index.aliases,
            "tensors": {key: _told(index.tensors, key) for key in _own_keys(index)},
        },
        allow_nan=False,
    )
    head = (
        f'{{"format": "consistent.checkpoint", "version": {_VERSION}, "serial": {index.serial}, '
        f'"crc32": {zlib.crc32(body.encode())}, "body": '
    )
    with open(path, "w") as file:
        file.write(head + body + "}\n")
        file.flush()
        os.fsync(file.fileno())


def _own_keys(index: Index) -> list[str]:
    return [key for key in index.tensors.state_dict_metadata if key not in index.aliases]


def _told(metadata: Metadata, key: str) -> dict[str, Any]:
    found: Any = metadata.state_dict_metadata[key]
    pieces = []
    for chunk in found.chunks:
        where: Where = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        place = [where.file, where.at, where.nbytes, list(where.checksums or ())]
        pieces.append([list(chunk.offsets), list(chunk.sizes), *place])
    dtype = str(found.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(found.size), "pieces": pieces}


def serial_of(path: str) -> int | None:
    """The serial number of the checkpoint whose index this is; None if it is not one."""
    try:
        with open(path, errors="replace") as file:
            head = _HEAD.match(file.read(200))
    except OSError:
        return None
    return int(head[2]) if head else None


def read(path: str) -> Index:
    """The index in this file.

    Raises:
        ValueError: the file is damaged, or its parts do not fit together.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise _damaged(path, f"it is not text ({error.reason})") from None
    head = _HEAD.match(text)
    if head is None or not text.endswith("}\n"):
        raise _damaged(path, "it does not begin and end as an index does")
    if int(head[1]) > _VERSION:
        raise ValueError(
            f"{path} is of version {head[1]}, and this library reads version {_VERSION}. Read it "
            "with the library that wrote it, or a later one."
        )
    body = text[head.end() : -2]
    if zlib.crc32(body.encode()) != int(head[3]):
        raise _damaged(path, "its checksum differs")
    try:
        index = _index_of(json.loads(body), int(head[2]), os.path.dirname(path))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return index


def _damaged(path: str, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}. Take an earlier checkpoint.")


def _index_of(body: dict[str, Any], serial: int, folder: str) -> Index:
    metadata = Metadata({}, storage_data={})
    for name, size in body["files"].items():
        _check_file(folder, name, size)
    for key, told in body["tensors"].items():
        _add_tensor(metadata, key, told, body["files"])
    for alias, key in body["aliases"].items():
        _add_alias(metadata, alias, key)
    given = ("values", "kinds", "differing", "aliases", "ranks", "step", "files")
    return Index(metadata, serial=serial, **{name: body[name] for name in given})


def _check_file(folder: str, name: str, size: int) -> None:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"it names a file outside its folder, {name!r}")
    path = os.path.join(folder, name)
    found = os.path.getsize(path) if os.path.isfile(path) else None
    if found != size:
        has = "is missing" if found is None else f"has {found} bytes"
        raise ValueError(f"{name} {has}, and was written with {size}")


def _add_tensor(metadata: Metadata, key: str, told: dict[str, Any], files: dict[str, int]) -> None:
    dtype = getattr(torch, told["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key}: {told['dtype']} is not a dtype")
    chunks = []
    for offset, sizes, file, at, nbytes, checksums in told["pieces"]:
        if nbytes != math.prod(sizes) * dtype.itemsize or min(at, nbytes) < 0:
            raise ValueError(f"{key}: a piece of {sizes} has {nbytes} bytes")
        if nbytes and at + nbytes > files[file]:
            raise ValueError(f"{key}: a piece lies beyond the end of {file}")
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
        where = Where(file, at, nbytes, tuple(checksums))
        metadata.storage_data[MetadataIndex(key, offset)] = where
    found = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(told["shape"]), chunks)
    check_pieces(key, found)
    metadata.state_dict_metadata[key] = found


def _add_alias(metadata: Metadata, alias: str, key: str) -> None:
    found: Any = metadata.state_dict_metadata[key]
    metadata.state_dict_metadata[alias] = found
    for chunk in found.chunks:
        where = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        metadata.storage_data[MetadataIndex(alias, chunk.offsets)] = where


def check_pieces(key: str, found: TensorStorageMetadata) -> None:
    """Raise ValueError unless the pieces make up the tensor: none overlap, and none is missing."""
    shape, chunks = found.size, found.chunks
    for chunk in chunks:
        box = (*zip(chunk.offsets, chunk.sizes, shape, strict=True),)
        if any(min(a, n) < 0 or a + n > whole for a, n, whole in box):
            raise ValueError(f"{key} of shape {tuple(shape)} has a piece outside it, {chunk}")
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise ValueError(f"{key} of shape {tuple(shape)} is not covered by its pieces")
    if len(chunks) > 1 and _overlap(shape, chunks):
        raise ValueError(f"{key} of shape {tuple(shape)} has pieces that overlap")


def _overlap(shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two pieces share an element: on the grid of all cuts, each cell has one owner."""
    cuts = [
        sorted({c.offsets[d] for c in chunks} | {c.offsets[d] + c.sizes[d] for c in chunks})
        for d in range(len(shape))
    ]
    places = [{cut: k for k, cut in enumerate(each)} for each in cuts]
    seen: set[tuple[int, ...]] = set()
    for c in chunks:
        if 0 in c.sizes:
            continue
        ends = [a + n for a, n in zip(c.offsets, c.sizes, strict=True)]
        spans = [range(p[a], p[b]) for p, a, b in zip(places, c.offsets, ends, strict=True)]
        for cell in product(*spans):
            if cell in seen:
                return True
            seen.add(cell)
    return False
