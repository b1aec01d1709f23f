"""Readers of checkpoints that other libraries wrote: safetensors and ``torch.save``.

No file is read by unpickling objects: ``torch.load`` is called with ``weights_only``. The sizes
that a file claims are checked against its own size before memory is allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from .. import checked
from ..values import encode
from .index import Index
from .pieces import NAMES, Where
from .reader import Box, FromPieces, Reader, add_whole, narrowed
from .torch_load import Room, loaded

_DTYPES = {name: dtype for dtype, name in NAMES.items()}

# -- safetensors -----------------------------------------------------------------------------------

_MANY = ".safetensors.index.json"  # of a model in several files, as transformers writes it


def safetensors(path: str) -> Reader:
    """Open a safetensors file, or a folder with the safetensors file or files of one model.

    Raises:
        ValueError: a file is damaged.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    metadata = Metadata({}, storage_data={})
    for name in _files_of(path):
        for key, told in _header(os.path.join(folder, name)).items():
            if key in metadata.state_dict_metadata:
                raise ValueError(f"{key!r} stands in two files of {folder}. Take another copy.")
            place = Where(name, told["at"], told["nbytes"], None)
            add_whole(metadata, key, told["shape"], told["dtype"], place)
    return FromPieces(folder, Index(metadata))


def is_safetensors(path: str) -> bool:
    """Return whether ``path`` is a safetensors file, or a folder that contains some."""
    return path.endswith(".safetensors") or (os.path.isdir(path) and bool(_files_of(path)))


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [os.path.basename(path)]
    names = sorted(os.listdir(path))
    for name in names:
        if name.endswith(_MANY):
            return files_named(os.path.join(path, name))
    return [name for name in names if name.endswith(".safetensors")]


def files_named(path: str) -> list[str]:
    """Return the names of the files that the index file ``path`` of transformers lists.

    For example ``["model-00001-of-00002.safetensors", ...]``, in the folder of the index.

    Raises:
        ValueError: ``path`` is not such an index.
    """
    return sorted(set(weight_map(path).values()))


def weight_map(path: str) -> dict[str, str]:
    """Return {tensor: file that contains it} from the index file ``path`` of transformers.

    Raises:
        ValueError: ``path`` is not such an index, or lists a file of another folder.
    """
    try:
        told = checked.of(dict, checked.parsed(checked.whole(path)), "it").get("weight_map")
        for name, file in checked.of(dict, told, "weight_map").items():
            checked.of(str, file, f"the file of {name}")
            if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
                raise ValueError(f"{file[:80]!r} is not a file of its folder")
    except ValueError as error:
        raise ValueError(
            f"{path} is not an index of files of safetensors ({error}). It was cut off or damaged; "
            "get it again."
        ) from None
    return told


def _header(path: str) -> dict[str, dict[str, Any]]:
    """Return, by name, what the header of a safetensors file says of each tensor.

    It is a dict with its "dtype", "shape", "at" (the offset in the file) and "nbytes". Raises
    ValueError if the file is damaged.
    """
    size = os.path.getsize(path)
    try:
        with checked.opened(path) as file:
            length = int.from_bytes(file.read(8), "little")
            # A forged length must not make this allocate much memory.
            if not 2 <= length <= min(size - 8, 100 << 20):
                raise ValueError(f"a header of {length} bytes does not fit")
            header = checked.of(dict, checked.parsed(file.read(length)), "its header")
        header.pop("__metadata__", None)
        found = {key: _place(key, told, 8 + length) for key, told in header.items()}
        _check_apart(found, 8 + length, size)
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} of {size} bytes is not a whole file of safetensors ({error}). It was cut off "
            "or damaged; get it again."
        ) from None


def _place(key: str, told: dict[str, Any], start: int) -> dict[str, Any]:
    begin, end = (checked.number(n, f"an offset of {key}") for n in told["data_offsets"])
    shape = checked.shape(told["shape"], f"the shape of {key}")
    if not isinstance(told["dtype"], str) or told["dtype"] not in _DTYPES:
        raise ValueError(f"{key} is of dtype {str(told['dtype'])[:40]!r}, which is not read here")
    dtype = _DTYPES[told["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key}, {told['dtype']} {list(shape)}, is not {end - begin} bytes long")
    return {"dtype": dtype, "shape": shape, "at": start + begin, "nbytes": end - begin}


def _check_apart(found: dict[str, dict[str, Any]], start: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the file without gaps, as the format requires.

    ``found`` is as ``_header`` returns it, ``start`` where the data begins, ``size`` the size of
    the file.
    """
    end = start
    for told in sorted(found.values(), key=lambda each: (each["at"], each["nbytes"])):
        if told["at"] != end:
            raise ValueError(f"a tensor begins at byte {told['at']}, and the last ends at {end}")
        end += told["nbytes"]
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, beyond its end or short of it")


# -- torch.save ------------------------------------------------------------------------------------


class InMemory(Reader):
    """Reader of a checkpoint whose tensors are in memory already, as ``torch_file`` makes it.

    The entries of its index are the tensors themselves.
    """

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        return narrowed(self.index.tensors.storage_data[stored], box)


def torch_file(path: str) -> Reader:
    """Open a ``torch.save`` file: the state dict of a module, or a dictionary of several objects.

    Raises:
        ValueError: the file is damaged, or contains objects other than tensors and values.
    """
    with checked.opened(path):  # raises unless it is a plain file that this process may read
        pass
    try:
        held = loaded(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a whole file of torch.save that holds tensors and values only: {error}"
        ) from None
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds a {type(held).__name__}, and not a dictionary.")
    return InMemory(_index_of(held, path))


def _index_of(held: Mapping[Any, Any], file: str) -> Index:
    """Return the index of the nested dictionary ``held``, which was loaded from ``file``.

    A tensor at its top level gets the kind "tensor": the file may be the state dict of one module.
    """
    index = Index(Metadata({}, storage_data={}))
    room = Room(os.path.getsize(file))

    def enter(x: torch.Tensor, path: tuple[str, ...]) -> str:
        key = ".".join(path)
        room.take(key, x)
        if key in index.tensors.state_dict_metadata:
            raise ValueError(f"two tensors of {file} would both be {key!r}. Save it by other keys.")
        add_whole(index.tensors, key, x.shape, x.dtype, x.detach())
        return key

    for name, value in held.items():
        index.values[str(name)] = encode(value, (str(name),), enter)
        index.kinds[str(name)] = kind_of(value)
    return index


def kind_of(value: Any) -> str:
    """Return the kind of a value in another library's checkpoint, for ``Index.kinds``.

    It is "tensor" for a tensor, "state" for a dictionary, and "value" for anything else.
    """
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "state" if isinstance(value, Mapping) else "value"
