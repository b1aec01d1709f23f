"""Reader of checkpoint folders that ``torch.distributed.checkpoint`` (DCP) wrote to a file system.

The index of such a folder is a pickle. It is parsed into records (``records.py``), and none of its
objects is created. What the index claims is checked against the files of the folder before memory
is allocated.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
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
from ..values import encode
from .foreign import kind_of
from .index import Index
from .reader import Box, Reader, narrowed
from .records import Record, records
from .tiling import check_pieces
from .torch_load import loaded

NAME = ".metadata"
_DCP = "torch.distributed.checkpoint."
_MOST_LEVELS = 60  # of a value in the dictionary that was saved


@dataclass(frozen=True)
class StoredByDcp:
    """Location of a piece of a tensor, or of a value, in a folder that DCP wrote.

    It is the file's name, the offset of the first byte and the number of bytes.
    """

    file: str
    at: int
    nbytes: int


class FromDcp(Reader):
    """Reader of a folder that ``torch.distributed.checkpoint`` wrote."""

    def __init__(self, folder: str, index: Index) -> None:
        super().__init__(index)
        self._folder = folder

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        held = self.record(stored)
        found: Any = self.index.tensors.state_dict_metadata[stored.fqn]
        dtype = found.properties.dtype
        # The file may contain another tensor than the index claims.
        if not isinstance(held, torch.Tensor) or (held.shape, held.dtype) != (chunk.sizes, dtype):
            raise ValueError(
                f"{stored.fqn}: what is stored is not a tensor of {dtype} and {chunk.sizes}."
            )
        return narrowed(held, box)

    def record(self, stored: MetadataIndex) -> Any:
        """Load the tensor or value that is stored under the entry ``stored`` of the index."""
        place: StoredByDcp = self.index.place_of(stored)
        path = os.path.join(self._folder, place.file)
        try:
            with checked.opened(path) as file:
                file.seek(place.at)
                return loaded(io.BytesIO(file.read(place.nbytes)))
        except ValueError as error:
            raise ValueError(f"{stored.fqn} in {path} cannot be read: {error}") from None


def dcp_folder(folder: str) -> Reader:
    """Open a checkpoint folder of ``torch.distributed.checkpoint`` for reading.

    Raises:
        ValueError: its index is damaged, or contains something that no index contains.
    """
    path = os.path.join(folder, NAME)
    text = checked.whole(path)
    try:
        held = _of(records(text), _DCP + "metadata.Metadata")
        index = Index(Metadata({}, storage_data=_places(held.field("storage_data"), folder)))
        reader = FromDcp(folder, index)
        nested = _Nested()
        paths = held.field("planner_data", None) or {}
        found = checked.of(dict, held.field("state_dict_metadata"), "state_dict_metadata")
        _check_count(found, len(text))
        for key, each in found.items():
            value = _entered(reader, checked.of(str, key, "a name"), each)
            nested.put(checked.of(dict, paths, "planner_data").get(key, (key,)), value)
        for name, value in nested.value().items():
            index.values[name] = _encode_places(value, (name,))
            index.kinds[name] = "tensor" if isinstance(value, _Place) else kind_of(value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not an index that is read here: {error}") from None
    return reader


def _of(given: Any, *names: str) -> Record:
    """Return ``given`` if it is the record of an object of a class in ``names``, else raise."""
    if not isinstance(given, Record) or given.args is None or given.name not in names:
        said = f"it would make a {given.name}" if isinstance(given, Record) else "it has no object"
        raise ValueError(f"{said} in place of a {names[0].rpartition('.')[2]}")
    return given


# -- locations in the files -----------------------------------------------------------------------


def _places(given: Any, folder: str) -> dict[MetadataIndex, StoredByDcp]:
    sizes: dict[str, int] = {}
    found: dict[MetadataIndex, StoredByDcp] = {}
    for key, told in checked.of(dict, given, "storage_data").items():
        at = _of(key, _DCP + "metadata.MetadataIndex")
        offset = at.field("offset", None)
        name = checked.of(str, at.field("fqn"), "a name")
        index = MetadataIndex(name, None if offset is None else _size(offset, name))
        found[index] = _stored(_of(told, _DCP + "filesystem._StorageInfo"), name, folder, sizes)
    _check_apart(found.values())
    return found


def _stored(told: Record, name: str, folder: str, sizes: dict[str, int]) -> StoredByDcp:
    file = checked.of(str, told.field("relative_path"), f"the file of {name}")
    if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
        raise ValueError(f"{name} lies outside the folder, at {file[:80]!r}.")
    if told.field("transform_descriptors", None):
        raise ValueError(f"{name} is compressed or encrypted, and is not read here.")
    if file not in sizes:
        path = os.path.join(folder, file)
        sizes[file] = os.path.getsize(path) if os.path.isfile(path) else -1
    at, nbytes = (checked.number(told.field(n), f"the {n} of {name}") for n in ("offset", "length"))
    if at + nbytes > sizes[file]:
        has = "is missing" if sizes[file] < 0 else f"has {sizes[file]} bytes"
        raise ValueError(f"{name} lies at bytes {at} to {at + nbytes} of {file}, which {has}")
    return StoredByDcp(file, at, nbytes)


def _check_apart(places: Any) -> None:
    """Raise ValueError if two of ``places`` overlap in their file.

    With overlaps, a small malicious file could describe more data than memory holds.
    """
    end, last = 0, ""
    for each in sorted(places, key=lambda p: (p.file, p.at, p.nbytes)):
        if each.file == last and each.at < end:
            raise ValueError(f"two entries lie at byte {each.at} of {each.file}")
        end, last = each.at + each.nbytes, each.file


# -- tensors and values ---------------------------------------------------------------------------


def _check_count(found: dict, size: int) -> None:
    """Raise ValueError if the tensors in ``found`` have more pieces than the index has bytes.

    ``size`` is the number of bytes. A pickle can refer to one list of pieces many times, and so
    describe more pieces than memory holds in few bytes.
    """
    lists = [each.field("chunks", ()) for each in found.values() if isinstance(each, Record)]
    if sum(len(each) for each in lists if isinstance(each, list)) > size:
        raise ValueError("it repeats its pieces")


class _Place:
    """Placeholder for the tensor ``key`` in a nested value, while the index is read."""

    def __init__(self, key: str) -> None:
        self.key = key


def _entered(reader: FromDcp, key: str, told: Any) -> Any:
    """Add the tensor ``key`` to the reader's index, or load the value ``key``.

    ``told`` is the record that describes it. Returns what represents it in the saved dictionary: a
    ``_Place``, or the value.
    """
    told = _of(told, *(_DCP + f"metadata.{n}StorageMetadata" for n in ("Tensor", "Bytes")))
    if told.name.endswith("BytesStorageMetadata"):
        return reader.record(MetadataIndex(key))
    properties = _of(told.field("properties"), _DCP + "metadata.TensorProperties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Record) or dtype.args is not None or dtype.name[:6] != "torch.":
        raise ValueError(f"{key} has no dtype")
    chunks = [
        ChunkStorageMetadata(_size(each.field("offsets"), key), _size(each.field("sizes"), key))
        for chunk in checked.of(list, told.field("chunks"), f"the pieces of {key}")
        for each in [_of(chunk, _DCP + "metadata.ChunkStorageMetadata")]
    ]
    found = TensorStorageMetadata(
        TensorProperties(dtype=checked.dtype(dtype.name[6:])),
        _size(told.field("size"), key),
        chunks,
    )
    check_pieces(key, found)
    for chunk in chunks:
        place = reader.index.tensors.storage_data.get(MetadataIndex(key, chunk.offsets))
        wanted = math.prod(chunk.sizes) * found.properties.dtype.itemsize
        if wanted and (place is None or place.nbytes < wanted):
            has = "none" if place is None else str(place.nbytes)
            raise ValueError(f"{key}: a piece of {wanted} bytes has {has} in its file")
    reader.index.tensors.state_dict_metadata[key] = found
    return _Place(key)


def _size(given: Any, key: str) -> torch.Size:
    args = _of(given, "torch.Size").args or ((),)
    return torch.Size(checked.shape(args[0], f"the shape of {key}"))


# -- the dictionary that was saved ----------------------------------------------------------------


class _Nested:
    """Builder of the nested dictionaries and lists that were saved, from values and their paths.

    The index of DCP is flat. ``put(("opt", "groups", 0, "lr"), 0.1)`` alone gives
    ``{"opt": {"groups": [{"lr": 0.1}]}}``.
    """

    def __init__(self) -> None:
        self._top: _Level = _Level()

    def put(self, path: Any, value: Any) -> None:
        """Add ``value`` at its path of keys. An int in the path is an index of a list.

        Raises ValueError if the path is malformed or leads through another value.
        """
        if type(path) is not tuple or not 0 < len(path) <= _MOST_LEVELS:
            raise ValueError(f"the path of a value is not a tuple of at most {_MOST_LEVELS} keys")
        level = self._top
        for key in path[:-1]:
            level = level.setdefault(_key(key), _Level())
            if not isinstance(level, _Level):
                raise ValueError(f"the path {path} leads through a value")
        if _key(path[-1]) in level:
            raise ValueError(f"two values stand at {path}")
        level[path[-1]] = value

    def value(self) -> dict[str, Any]:
        """Return the dictionary that the calls of ``put`` describe."""
        if not all(isinstance(key, str) for key in self._top):
            raise ValueError("what was saved is not a dictionary of texts")
        return {key: _made(each) for key, each in self._top.items()}


class _Level(dict):
    """One dictionary or list while ``_Nested`` builds it; the keys of a list are its indices."""


def _key(key: Any) -> Any:
    if type(key) not in (int, str):
        raise ValueError(f"a path has a {type(key).__name__} in it")
    return key


def _made(level: Any) -> Any:
    if not isinstance(level, _Level):
        return level
    values = {key: _made(each) for key, each in level.items()}
    if not any(type(key) is int for key in values):
        return values
    if sorted(map(str, values)) != sorted(map(str, range(len(values)))):
        raise ValueError("the places of a list are not 0, 1, 2 and so on")
    return [values[k] for k in range(len(values))]


def _encode_places(value: Any, path: tuple[str, ...]) -> Any:
    """Encode a nested value as ``values.encode`` does, where a ``_Place`` stands for each tensor.

    ``path`` are the keys that lead to ``value``.
    """
    if isinstance(value, _Place):
        return {"$tensor": value.key}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _encode_places(each, (*path, k)) for k, each in value.items()}
    if isinstance(value, list):
        return [_encode_places(each, (*path, str(k))) for k, each in enumerate(value)]
    return encode(value, path, _no_tensor)


def _no_tensor(x: torch.Tensor, path: tuple[str, ...]) -> str:
    raise ValueError(f"{'.'.join(path)[:80]} is a tensor that is stored as a value")
