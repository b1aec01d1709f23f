"""Checkpoints that others wrote: safetensors, ``torch.save``, ``torch.distributed.checkpoint``.

None is read by unpickling objects: ``torch.load`` is told ``weights_only``, and the pickled index
of ``torch.distributed.checkpoint`` is read by an unpickler that makes that index's own classes and
no others.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..values import encode
from .index import Index, check_pieces
from .pieces import NAMES, Where
from .reader import Box, FromPieces, Reader, add_whole

_DTYPES = {name: dtype for dtype, name in NAMES.items()}

# -- safetensors -----------------------------------------------------------------------------------

_MANY = ".safetensors.index.json"  # of a model in several files, as transformers writes it


def safetensors(path: str) -> Reader:
    """A file, or a folder with the file or files of one model.

    Raises:
        ValueError: a file is damaged.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    metadata = Metadata({}, storage_data={})
    for name in _files_of(path):
        for key, told in _header(os.path.join(folder, name)).items():
            place = Where(name, told["at"], told["nbytes"], None)
            add_whole(metadata, key, told["shape"], told["dtype"], place)
    return FromPieces(folder, Index(metadata))


def is_safetensors(path: str) -> bool:
    """Whether it is a file of safetensors or a folder with some."""
    return path.endswith(".safetensors") or (os.path.isdir(path) and bool(_files_of(path)))


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [os.path.basename(path)]
    names = sorted(os.listdir(path))
    for name in names:
        if name.endswith(_MANY):
            with open(os.path.join(path, name)) as file:
                found = sorted(set(json.load(file)["weight_map"].values()))
            return [os.path.basename(each) for each in found]
    return [name for name in names if name.endswith(".safetensors")]


def _header(path: str) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape, place and bytes of each tensor in a file."""
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, 100 << 20):
                raise ValueError(f"a header of {length} bytes does not fit")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {key: _place(told, 8 + length, size) for key, told in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} of {size} bytes is no whole file of safetensors ({error}). It was cut off or "
            "damaged; get it again."
        ) from None


def _place(told: dict[str, Any], start: int, size: int) -> dict[str, Any]:
    begin, end = told["data_offsets"]
    dtype, shape = _DTYPES[told["dtype"]], told["shape"]
    if not 0 <= begin <= end <= size - start:
        raise ValueError(f"bytes {begin} to {end} of it lie beyond its end")
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{told['dtype']} {shape} is not {end - begin} bytes long")
    return {"dtype": dtype, "shape": shape, "at": start + begin, "nbytes": end - begin}


# -- torch.save ------------------------------------------------------------------------------------


class InMemory(Reader):
    """Tensors that a file of ``torch.save`` maps into memory."""

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        return _box_of(self.index.tensors.storage_data[stored], box)


def torch_file(path: str) -> Reader:
    """A file of ``torch.save``: the state dict of a module, or a dictionary of several objects.

    Raises:
        ValueError: it is damaged, or holds objects other than tensors and values.
    """
    try:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used with files" not in str(error):  # of torch before 1.6
                raise
            held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is no whole file of torch.save that holds tensors and values only: {why}"
        ) from None
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds a {type(held).__name__}, and not a dictionary.")
    return InMemory(_index_of(held))


def _index_of(held: Mapping[Any, Any]) -> Index:
    """The index of a nested dictionary; tensors at its top belong to one module."""
    index = Index(Metadata({}, storage_data={}))

    def enter(x: torch.Tensor, path: tuple[str, ...]) -> str:
        key = ".".join(path)
        add_whole(index.tensors, key, x.shape, x.dtype, x.detach())
        return key

    for name, value in held.items():
        index.values[str(name)] = encode(value, (str(name),), enter)
        index.kinds[str(name)] = _kind(value)
    return index


def _kind(value: Any) -> str:
    """What was saved, as ``Index.kinds`` says; a tensor may be one of a module."""
    if isinstance(value, torch.Tensor | _Place):
        return "tensor"
    return "state" if isinstance(value, Mapping) else "value"


# -- torch.distributed.checkpoint ------------------------------------------------------------------

DCP_INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint."
_DCP_CLASSES = {
    _DCP + "metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    _DCP + "filesystem": {"_StorageInfo"},
    "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values()
                        if isinstance(d, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _DCP_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it would make a {module}.{name}")
        return super().find_class(module, name)


class FromDcp(Reader):
    """Reads a folder that ``torch.distributed.checkpoint.save`` wrote to a file system."""

    def __init__(self, folder: str, index: Index) -> None:
        super().__init__(index)
        self._folder = folder

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        held = self.record(stored)
        if not isinstance(held, torch.Tensor) or held.shape != chunk.sizes:
            raise ValueError(f"{stored.fqn}: what is stored is not a tensor of {chunk.sizes}.")
        return _box_of(held, box)

    def record(self, stored: MetadataIndex) -> Any:
        """What is stored there: a tensor, or a value."""
        info = self.index.tensors.storage_data[stored]
        if os.path.basename(info.relative_path) != info.relative_path:
            raise ValueError(f"{stored.fqn} lies outside the folder, at {info.relative_path!r}.")
        path = os.path.join(self._folder, info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{path} is compressed or encrypted, and is not read here.")
        try:
            with open(path, "rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            return torch.load(data, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"{stored.fqn} in {path} cannot be read: {why}") from None


def dcp_folder(folder: str) -> Reader:
    """A folder of ``torch.distributed.checkpoint``.

    Raises:
        ValueError: its index is damaged, or would make objects of other classes.
    """
    path = os.path.join(folder, DCP_INDEX)
    try:
        with open(path, "rb") as file:
            held = _Unpickler(file).load()
        index = Index(Metadata({}, storage_data=held.storage_data))
        reader = FromDcp(folder, index)
        nested: dict[str, Any] = {}
        for key, found in held.state_dict_metadata.items():
            _enter_dcp(reader, held, key, found, nested)
        _name_values(index, nested)
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no index that is read here: {error}") from None
    return reader


class _Place:
    """Stands for a tensor in a value."""

    def __init__(self, key: str) -> None:
        self.key = key


def _enter_dcp(reader: FromDcp, held: Metadata, key: str, found: Any, nested: Any) -> None:
    """Enter a tensor or value, and put it where the dictionary that was saved had it."""
    value: Any
    if isinstance(found, TensorStorageMetadata):
        check_pieces(key, found)
        reader.index.tensors.state_dict_metadata[key] = found
        value = _Place(key)
    elif isinstance(found, BytesStorageMetadata):
        value = reader.record(MetadataIndex(key))
    else:
        raise TypeError(f"{key} is a {type(found).__name__}")
    set_element(nested, (held.planner_data or {}).get(key, (key,)), value)


def _name_values(index: Index, nested: dict[str, Any]) -> None:
    for name, value in nested.items():
        index.values[name] = _encode_places(value, (name,))
        index.kinds[name] = _kind(value)


def _encode_places(value: Any, path: tuple[str, ...]) -> Any:
    """``values.encode`` of a nested value in which ``_Place`` stands for tensors."""
    if isinstance(value, _Place):
        return {"$tensor": value.key}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _encode_places(each, (*path, k)) for k, each in value.items()}
    if isinstance(value, list):
        return [_encode_places(each, (*path, str(k))) for k, each in enumerate(value)]
    return encode(value, path, lambda x, _: "")


def _box_of(x: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (start, size) in enumerate(zip(*box, strict=True)):
        x = x.narrow(d, start, size)
    return x
