"""The index of a checkpoint: one JSON file that describes what the data files contain.

The index contains a checksum of itself. It is written last, and the folder gets its name after
that, so a folder with an index is complete. In memory the tensors are described by the ``Metadata``
of ``torch.distributed.checkpoint``, for checkpoints of every format.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .. import checked
from .pieces import BLOCK, Location
from .tiling import check_pieces

NAME = "checkpoint.json"
_HEAD = re.compile(
    rb'\{"format": "consistent.checkpoint", "version": (\d+), "serial": (\d+), "crc32": (\d+), '
    rb'"body": '
)
_VERSION = 1


@dataclass
class Index:
    """Description of what a checkpoint contains.

    Attributes:
        kinds: name given to ``save`` -> what it was: "module", "optimizer", "state" or "value"; in
            other formats also "tensor", which may belong to a module.
        values: name -> its value as ``values.encode`` writes it, equal on all ranks; or, for a name
            in ``differing``, a list with one value for each rank.
        tensors: the tensors and their pieces; ``storage_data`` gives the ``Location`` of each
            piece.
        aliases: a further name of a tensor -> its name in ``tensors``.
        differing: names of values and tensors that differed between ranks, of which each rank's
            version is stored.
        ranks: the number of ranks that saved the checkpoint.
        serial: its number among the saves into its folder; the latest has the highest.
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

    crc32: int = 0  # checksum of the text; 0 for other formats

    def location_of(self, stored: MetadataIndex) -> Any:
        """Return where a piece of a tensor is stored; the tensor may be named by an alias.

        The result is that reader's own kind of location, such as a ``Location``.
        """
        name = self.aliases.get(stored.fqn, stored.fqn)
        return self.tensors.storage_data[MetadataIndex(name, stored.offset)]


def write(path: str, index: Index) -> None:
    """Write the index to the file ``path``, and wait until it is on disk."""
    body = json.dumps(
        {
            "step": index.step,
            "ranks": index.ranks,
            "files": index.files,
            "kinds": index.kinds,
            "values": index.values,
            "differing": index.differing,
            "aliases": index.aliases,
            "tensors": {
                key: _describe_tensor(index.tensors, key) for key in _keys_without_aliases(index)
            },
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


def _keys_without_aliases(index: Index) -> list[str]:
    return [key for key in index.tensors.state_dict_metadata if key not in index.aliases]


def _describe_tensor(metadata: Metadata, key: str) -> dict[str, Any]:
    tensor: Any = metadata.state_dict_metadata[key]
    pieces = []
    for chunk in tensor.chunks:
        where: Location = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        place = [where.file, where.at, where.nbytes, list(where.checksums or ())]
        pieces.append([list(chunk.offsets), list(chunk.sizes), *place])
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}


def serial_of(path: str) -> int | None:
    """Return the serial number of the checkpoint whose index is the file ``path``.

    Returns None if the file is not an index.
    """
    try:
        with checked.open_plain_file(path) as file:
            head = _HEAD.match(file.read(200))
    except (OSError, ValueError):
        return None
    return int(head[2]) if head else None


def read(path: str) -> Index:
    """Read and verify the index in the file ``path``.

    Raises:
        ValueError: the file is damaged, or its parts do not fit together.
    """
    text = checked.read_bytes(path)
    head = _HEAD.match(text)
    if head is None or not text.endswith(b"}\n"):
        raise _damaged_error(path, "it does not begin and end as an index does")
    if int(head[1]) > _VERSION:
        raise ValueError(
            f"{path} is of version {int(head[1])}, and this library reads version {_VERSION}. Read "
            "it with the library that wrote it, or a later one."
        )
    body = memoryview(text)[head.end() : -2]
    if zlib.crc32(body) != int(head[3]):
        raise _damaged_error(path, "its checksum differs")
    try:
        index = _parse_index(checked.parse_json(body), int(head[2]), os.path.dirname(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise _damaged_error(path, f"{kind}{error}") from error
    index.crc32 = int(head[3])
    return index


def stamp_of(index: Index) -> int:
    """Return a number that identifies a checkpoint, to notice if ranks read different ones.

    It is the checksum of the index, or, for other formats, of the names, kinds, shapes and dtypes.
    """
    if index.crc32:
        return index.crc32
    entries: Any = index.tensors.state_dict_metadata
    descriptions = [
        (key, tuple(x.size), str(x.properties.dtype)) for key, x in sorted(entries.items())
    ]
    return zlib.crc32(
        repr((descriptions, sorted(index.kinds.items()))).encode("utf-8", "backslashreplace")
    )


def _damaged_error(path: str, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}. Take an earlier checkpoint.")


# Types of the entries that are copied into the ``Index`` unchanged.
_ENTRIES = {
    "values": dict, "kinds": dict, "differing": list, "aliases": dict, "ranks": int, "files": dict,
}  # fmt: skip


def _parse_index(body: Any, serial: int, folder: str) -> Index:
    metadata = Metadata({}, storage_data={})
    for name, kind in _ENTRIES.items():
        checked.check_type(kind, body[name], name)
    for name, size in body["files"].items():
        _check_file(folder, name, size)
    for key, entry in body["tensors"].items():
        _add_tensor(metadata, key, entry, body["files"])
    check_no_overlap(metadata.storage_data.values())
    for alias, key in body["aliases"].items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
    if body["step"] is not None:
        checked.check_type(int, body["step"], "step")
    for name in body["differing"]:
        if name in body["values"]:
            values = checked.check_type(list, body["values"][name], name)
            if len(values) != body["ranks"]:
                raise ValueError(f"{name} has {len(values)} values of {body['ranks']} ranks")
    return Index(
        metadata, serial=serial, step=body["step"], **{name: body[name] for name in _ENTRIES}
    )


def _check_file(folder: str, name: str, size: int) -> None:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"it names a file outside its folder, {name!r}")
    path = os.path.join(folder, name)
    actual_size = os.path.getsize(path) if os.path.isfile(path) else None
    if actual_size != size:
        problem = "is missing" if actual_size is None else f"has {actual_size} bytes"
        raise ValueError(f"{name} {problem}, and was written with {size}")


def _add_tensor(metadata: Metadata, key: str, entry: dict[str, Any], files: dict[str, int]) -> None:
    dtype = checked.check_dtype(entry["dtype"])
    size = checked.check_shape(entry["shape"], f"the shape of {key}")
    chunks = []
    for piece in checked.check_type(list, entry["pieces"], f"the pieces of {key}"):
        offset, sizes = (checked.check_shape(each, f"a piece of {key}") for each in piece[:2])
        where = _parse_location(key, piece[2:], math.prod(sizes) * dtype.itemsize, files)
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
        metadata.storage_data[MetadataIndex(key, offset)] = where
    tensor = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)
    check_pieces(key, tensor)
    metadata.state_dict_metadata[key] = tensor


def _parse_location(
    key: str, entry: list[Any], needed_bytes: int, files: dict[str, int]
) -> Location:
    file, at, nbytes, checksums = entry
    checked.check_type(list, checksums, f"the checksums of {key}")
    if checked.check_number(nbytes, f"the bytes of {key}") != needed_bytes:
        raise ValueError(f"{key}: a piece of {needed_bytes} bytes has {nbytes} bytes")
    if nbytes and (type(at) is not int or not 0 <= at <= files[file] - nbytes):
        raise ValueError(f"{key}: a piece lies beyond the end of {file}")
    if len(checksums) != -(-nbytes // BLOCK):
        raise ValueError(f"{key}: a piece of {nbytes} bytes has {len(checksums)} checksums")
    return Location(file, at, nbytes, tuple(checksums))


def check_no_overlap(locations: Iterable[Location]) -> None:
    """Raise ValueError if two pieces overlap in their file.

    With overlaps, a small malicious file could describe more data than memory holds.
    """
    spans = sorted((p.file, p.at, p.nbytes) for p in locations if p.nbytes)
    for (file, at, nbytes), (next_file, start, _) in pairwise(spans):
        if file == next_file and at + nbytes > start:
            raise ValueError(f"two pieces lie at byte {start} of {file}")
