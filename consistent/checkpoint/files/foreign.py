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
from .pieces import DTYPE_NAMES, Location
from .reader import Box, Reader, SafetensorsReader, add_unsharded, narrow_to_box
from .torch_load import SizeLimit, load_safely

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# -- safetensors -----------------------------------------------------------------------------------

_INDEX_SUFFIX = ".safetensors.index.json"  # of a model in several files, as transformers writes it


def open_safetensors(path: str) -> Reader:
    """Open a safetensors file, or a folder with the safetensors file or files of one model.

    Raises:
        ValueError: a file is damaged.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    metadata = Metadata({}, storage_data={})
    for name in _files_of(path):
        for key, entry in _header(os.path.join(folder, name)).items():
            if key in metadata.state_dict_metadata:
                raise ValueError(f"{key!r} stands in two files of {folder}. Take another copy.")
            place = Location(name, entry["at"], entry["nbytes"], None)
            add_unsharded(metadata, key, entry["shape"], entry["dtype"], place)
    return SafetensorsReader(folder, Index(metadata))


def is_safetensors(path: str) -> bool:
    """Return whether ``path`` is a safetensors file, or a folder that contains some."""
    return path.endswith(".safetensors") or (os.path.isdir(path) and bool(_files_of(path)))


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [os.path.basename(path)]
    names = sorted(os.listdir(path))
    for name in names:
        if name.endswith(_INDEX_SUFFIX):
            return files_in_index(os.path.join(path, name))
    return [name for name in names if name.endswith(".safetensors")]


def files_in_index(path: str) -> list[str]:
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
        mapping = checked.check_type(dict, checked.parse_json(checked.read_bytes(path)), "it").get(
            "weight_map"
        )
        for name, file in checked.check_type(dict, mapping, "weight_map").items():
            checked.check_type(str, file, f"the file of {name}")
            if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
                raise ValueError(f"{file[:80]!r} is not a file of its folder")
    except ValueError as error:
        raise ValueError(
            f"{path} is not an index of files of safetensors ({error}). It was cut off or damaged; "
            "get it again."
        ) from None
    return mapping


def _header(path: str) -> dict[str, dict[str, Any]]:
    """Return, by name, what the header of a safetensors file says of each tensor.

    It is a dict with its "dtype", "shape", "at" (the offset in the file) and "nbytes". Raises
    ValueError if the file is damaged.
    """
    size = os.path.getsize(path)
    try:
        with checked.open_plain_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            # A forged length must not make this allocate much memory.
            if not 2 <= length <= min(size - 8, 100 << 20):
                raise ValueError(f"a header of {length} bytes does not fit")
            header = checked.check_type(dict, checked.parse_json(file.read(length)), "its header")
        header.pop("__metadata__", None)
        tensors = {key: _tensor_location(key, entry, 8 + length) for key, entry in header.items()}
        _check_no_gaps(tensors, 8 + length, size)
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} of {size} bytes is not a whole file of safetensors ({error}). It was cut off "
            "or damaged; get it again."
        ) from None


def _tensor_location(key: str, entry: dict[str, Any], start: int) -> dict[str, Any]:
    begin, end = (checked.check_number(n, f"an offset of {key}") for n in entry["data_offsets"])
    shape = checked.check_shape(entry["shape"], f"the shape of {key}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ValueError(f"{key} is of dtype {str(entry['dtype'])[:40]!r}, which is not read here")
    dtype = _DTYPES[entry["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key}, {entry['dtype']} {list(shape)}, is not {end - begin} bytes long")
    return {"dtype": dtype, "shape": shape, "at": start + begin, "nbytes": end - begin}


def _check_no_gaps(tensors: dict[str, dict[str, Any]], start: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the file without gaps, as the format requires.

    ``tensors`` is as ``_header`` returns it, ``start`` where the data begins, ``size`` the size of
    the file.
    """
    end = start
    for tensor in sorted(tensors.values(), key=lambda each: (each["at"], each["nbytes"])):
        if tensor["at"] != end:
            raise ValueError(f"a tensor begins at byte {tensor['at']}, and the last ends at {end}")
        end += tensor["nbytes"]
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, beyond its end or short of it")


# -- torch.save ------------------------------------------------------------------------------------


class InMemoryReader(Reader):
    """Reader of a checkpoint whose tensors are in memory already, as ``open_torch_file`` makes it.

    The entries of its index are the tensors themselves.
    """

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        return narrow_to_box(self.index.tensors.storage_data[stored], box)


def open_torch_file(path: str) -> Reader:
    """Open a ``torch.save`` file: the state dict of a module, or a dictionary of several objects.

    Raises:
        ValueError: the file is damaged, or contains objects other than tensors and values.
    """
    # Raises unless it is a plain file that this process may read.
    with checked.open_plain_file(path):
        pass
    try:
        contents = load_safely(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a whole file of torch.save that holds tensors and values only: {error}"
        ) from None
    if not isinstance(contents, Mapping):
        raise ValueError(f"{path} holds a {type(contents).__name__}, and not a dictionary.")
    return InMemoryReader(_index_of(contents, path))


def _index_of(contents: Mapping[Any, Any], file: str) -> Index:
    """Return the index of the nested dictionary ``contents``, which was loaded from ``file``.

    A tensor at its top level gets the kind "tensor": the file may be the state dict of one module.
    """
    index = Index(Metadata({}, storage_data={}))
    limit = SizeLimit(os.path.getsize(file))

    def enter(x: torch.Tensor, path: tuple[str, ...]) -> str:
        key = ".".join(path)
        limit.count(key, x)
        if key in index.tensors.state_dict_metadata:
            raise ValueError(f"two tensors of {file} would both be {key!r}. Save it by other keys.")
        add_unsharded(index.tensors, key, x.shape, x.dtype, x.detach())
        return key

    for name, value in contents.items():
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
