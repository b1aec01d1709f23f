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
from .reader import Box, Reader, narrow_to_box
from .records import Record, records
from .tiling import check_pieces
from .torch_load import load_safely

NAME = ".metadata"
_DCP = "torch.distributed.checkpoint."
_MAX_LEVELS = 60  # of a value in the dictionary that was saved


@dataclass(frozen=True)
class DcpLocation:
    """Location of a piece of a tensor, or of a value, in a folder that DCP wrote.

    It is the file's name, the offset of the first byte and the number of bytes.
    """

    file: str
    at: int
    nbytes: int


class DcpReader(Reader):
    """Reader of a folder that ``torch.distributed.checkpoint`` wrote."""

    def __init__(self, folder: str, index: Index) -> None:
        super().__init__(index)
        self._folder = folder

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        data = self.record(stored)
        metadata: Any = self.index.tensors.state_dict_metadata[stored.fqn]
        dtype = metadata.properties.dtype
        # The file may contain another tensor than the index claims.
        if not isinstance(data, torch.Tensor) or (data.shape, data.dtype) != (chunk.sizes, dtype):
            raise ValueError(
                f"{stored.fqn}: what is stored is not a tensor of {dtype} and {chunk.sizes}."
            )
        return narrow_to_box(data, box)

    def record(self, stored: MetadataIndex) -> Any:
        """Load the tensor or value that is stored under the entry ``stored`` of the index."""
        place: DcpLocation = self.index.location_of(stored)
        path = os.path.join(self._folder, place.file)
        try:
            with checked.open_plain_file(path) as file:
                file.seek(place.at)
                return load_safely(io.BytesIO(file.read(place.nbytes)))
        except ValueError as error:
            raise ValueError(f"{stored.fqn} in {path} cannot be read: {error}") from None


def open_dcp_folder(folder: str) -> Reader:
    """Open a checkpoint folder of ``torch.distributed.checkpoint`` for reading.

    Raises:
        ValueError: its index is damaged, or contains something that no index contains.
    """
    path = os.path.join(folder, NAME)
    text = checked.read_bytes(path)
    try:
        root = _as_record(records(text), _DCP + "metadata.Metadata")
        index = Index(Metadata({}, storage_data=_locations(root.field("storage_data"), folder)))
        reader = DcpReader(folder, index)
        nested = _NestedBuilder()
        paths = root.field("planner_data", None) or {}
        entries = checked.check_type(dict, root.field("state_dict_metadata"), "state_dict_metadata")
        _check_piece_count(entries, len(text))
        for key, entry in entries.items():
            value = _load_entry(reader, checked.check_type(str, key, "a name"), entry)
            nested.put(checked.check_type(dict, paths, "planner_data").get(key, (key,)), value)
        for name, value in nested.value().items():
            index.values[name] = _encode_placeholders(value, (name,))
            index.kinds[name] = "tensor" if isinstance(value, _Placeholder) else kind_of(value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not an index that is read here: {error}") from None
    return reader


def _as_record(value: Any, *names: str) -> Record:
    """Return ``value`` if it is the record of an object of a class in ``names``, else raise."""
    if not isinstance(value, Record) or value.args is None or value.name not in names:
        fault = f"it would make a {value.name}" if isinstance(value, Record) else "it has no object"
        raise ValueError(f"{fault} in place of a {names[0].rpartition('.')[2]}")
    return value


# -- locations in the files -----------------------------------------------------------------------


def _locations(storage_data: Any, folder: str) -> dict[MetadataIndex, DcpLocation]:
    sizes: dict[str, int] = {}
    locations: dict[MetadataIndex, DcpLocation] = {}
    for key, info in checked.check_type(dict, storage_data, "storage_data").items():
        key_record = _as_record(key, _DCP + "metadata.MetadataIndex")
        offset = key_record.field("offset", None)
        name = checked.check_type(str, key_record.field("fqn"), "a name")
        index = MetadataIndex(name, None if offset is None else _size_from_record(offset, name))
        locations[index] = _location(
            _as_record(info, _DCP + "filesystem._StorageInfo"), name, folder, sizes
        )
    _check_no_overlap(locations.values())
    return locations


def _location(info: Record, name: str, folder: str, sizes: dict[str, int]) -> DcpLocation:
    file = checked.check_type(str, info.field("relative_path"), f"the file of {name}")
    if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
        raise ValueError(f"{name} lies outside the folder, at {file[:80]!r}.")
    if info.field("transform_descriptors", None):
        raise ValueError(f"{name} is compressed or encrypted, and is not read here.")
    if file not in sizes:
        path = os.path.join(folder, file)
        sizes[file] = os.path.getsize(path) if os.path.isfile(path) else -1
    at, nbytes = (
        checked.check_number(info.field(n), f"the {n} of {name}") for n in ("offset", "length")
    )
    if at + nbytes > sizes[file]:
        has = "is missing" if sizes[file] < 0 else f"has {sizes[file]} bytes"
        raise ValueError(f"{name} lies at bytes {at} to {at + nbytes} of {file}, which {has}")
    return DcpLocation(file, at, nbytes)


def _check_no_overlap(locations: Any) -> None:
    """Raise ValueError if two of ``locations`` overlap in their file.

    With overlaps, a small malicious file could describe more data than memory holds.
    """
    end, last_file = 0, ""
    for location in sorted(locations, key=lambda p: (p.file, p.at, p.nbytes)):
        if location.file == last_file and location.at < end:
            raise ValueError(f"two entries lie at byte {location.at} of {location.file}")
        end, last_file = location.at + location.nbytes, location.file


# -- tensors and values ---------------------------------------------------------------------------


def _check_piece_count(entries: dict, size: int) -> None:
    """Raise ValueError if the tensors in ``entries`` have more pieces than the index has bytes.

    ``size`` is the number of bytes. A pickle can refer to one list of pieces many times, and so
    describe more pieces than memory holds in few bytes.
    """
    lists = [each.field("chunks", ()) for each in entries.values() if isinstance(each, Record)]
    if sum(len(each) for each in lists if isinstance(each, list)) > size:
        raise ValueError("it repeats its pieces")


class _Placeholder:
    """Placeholder for the tensor ``key`` in a nested value, while the index is read."""

    def __init__(self, key: str) -> None:
        self.key = key


def _load_entry(reader: DcpReader, key: str, info: Any) -> Any:
    """Add the tensor ``key`` to the reader's index, or load the value ``key``.

    ``info`` is the record that describes it. Returns what represents it in the saved dictionary: a
    ``_Placeholder``, or the value.
    """
    info = _as_record(info, *(_DCP + f"metadata.{n}StorageMetadata" for n in ("Tensor", "Bytes")))
    if info.name.endswith("BytesStorageMetadata"):
        return reader.record(MetadataIndex(key))
    properties = _as_record(info.field("properties"), _DCP + "metadata.TensorProperties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Record) or dtype.args is not None or dtype.name[:6] != "torch.":
        raise ValueError(f"{key} has no dtype")
    chunks = [
        ChunkStorageMetadata(
            _size_from_record(each.field("offsets"), key),
            _size_from_record(each.field("sizes"), key),
        )
        for chunk in checked.check_type(list, info.field("chunks"), f"the pieces of {key}")
        for each in [_as_record(chunk, _DCP + "metadata.ChunkStorageMetadata")]
    ]
    metadata = TensorStorageMetadata(
        TensorProperties(dtype=checked.check_dtype(dtype.name[6:])),
        _size_from_record(info.field("size"), key),
        chunks,
    )
    check_pieces(key, metadata)
    for chunk in chunks:
        place = reader.index.tensors.storage_data.get(MetadataIndex(key, chunk.offsets))
        needed_bytes = math.prod(chunk.sizes) * metadata.properties.dtype.itemsize
        if needed_bytes and (place is None or place.nbytes < needed_bytes):
            has = "none" if place is None else str(place.nbytes)
            raise ValueError(f"{key}: a piece of {needed_bytes} bytes has {has} in its file")
    reader.index.tensors.state_dict_metadata[key] = metadata
    return _Placeholder(key)


def _size_from_record(record: Any, key: str) -> torch.Size:
    args = _as_record(record, "torch.Size").args or ((),)
    return torch.Size(checked.check_shape(args[0], f"the shape of {key}"))


# -- the dictionary that was saved ----------------------------------------------------------------


class _NestedBuilder:
    """Builder of the nested dictionaries and lists that were saved, from values and their paths.

    The index of DCP is flat. ``put(("opt", "groups", 0, "lr"), 0.1)`` alone gives
    ``{"opt": {"groups": [{"lr": 0.1}]}}``.
    """

    def __init__(self) -> None:
        self._top_level: _Level = _Level()

    def put(self, path: Any, value: Any) -> None:
        """Add ``value`` at its path of keys. An int in the path is an index of a list.

        Raises ValueError if the path is malformed or leads through another value.
        """
        if type(path) is not tuple or not 0 < len(path) <= _MAX_LEVELS:
            raise ValueError(f"the path of a value is not a tuple of at most {_MAX_LEVELS} keys")
        level = self._top_level
        for key in path[:-1]:
            level = level.setdefault(_check_key(key), _Level())
            if not isinstance(level, _Level):
                raise ValueError(f"the path {path} leads through a value")
        if _check_key(path[-1]) in level:
            raise ValueError(f"two values stand at {path}")
        level[path[-1]] = value

    def value(self) -> dict[str, Any]:
        """Return the dictionary that the calls of ``put`` describe."""
        if not all(isinstance(key, str) for key in self._top_level):
            raise ValueError("what was saved is not a dictionary of texts")
        return {key: _build_level(each) for key, each in self._top_level.items()}


class _Level(dict):
    """A dictionary or list that ``_NestedBuilder`` builds; the keys of a list are its indices."""


def _check_key(key: Any) -> Any:
    if type(key) not in (int, str):
        raise ValueError(f"a path has a {type(key).__name__} in it")
    return key


def _build_level(level: Any) -> Any:
    if not isinstance(level, _Level):
        return level
    values = {key: _build_level(each) for key, each in level.items()}
    if not any(type(key) is int for key in values):
        return values
    if sorted(map(str, values)) != sorted(map(str, range(len(values)))):
        raise ValueError("the places of a list are not 0, 1, 2 and so on")
    return [values[k] for k in range(len(values))]


def _encode_placeholders(value: Any, path: tuple[str, ...]) -> Any:
    """Encode a nested value as ``values.encode`` does.

    A ``_Placeholder`` stands for each tensor in it. ``path`` are the keys that lead to ``value``.
    """
    if isinstance(value, _Placeholder):
        return {"$tensor": value.key}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _encode_placeholders(each, (*path, k)) for k, each in value.items()}
    if isinstance(value, list):
        return [_encode_placeholders(each, (*path, str(k))) for k, each in enumerate(value)]
    return encode(value, path, _refuse_tensor)


def _refuse_tensor(x: torch.Tensor, path: tuple[str, ...]) -> str:
    raise ValueError(f"{'.'.join(path)[:80]} is a tensor that is stored as a value")
