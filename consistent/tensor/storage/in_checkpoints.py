"""The protocol by which ``torch.distributed.checkpoint`` saves and loads a global tensor.

It calls three methods:

```
                 rank 0            rank 1            rank 2 (outside the placement)
S(0) of [5, 4]   [0:3, :]          [3:5, :]          nothing
B    of [5, 4]   [0:5, :]          [0:5, :]          nothing     the planner lets one of them write
```

Nothing is sent. Each rank reads or writes its shard, as a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.plans.shards import plain
from ...dispatch.running.moved_views import refresh
from ...movement.world import my_coordinate
from ...spec import TensorSpec

Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts, sizes


def box_of(spec: TensorSpec) -> Box | None:
    """Return (starts, sizes) of the region of the tensor that this rank saves and loads, or None.

    None means that the rank has no part. If the tensor has no elements, each rank of the placement
    has all of it, so that its shape is saved.

    Raises:
        RuntimeError: a shard is not one contiguous region, as with a cut such as zigzag.
    """
    coordinate = my_coordinate(spec.placement)
    if coordinate is None:
        return None
    if spec.numel == 0:
        return (0,) * spec.ndim, tuple(spec.shape)
    if spec.layout.is_cut:
        raise RuntimeError(  # no ValueError, which torch would hide
            f"checkpoint: a tensor is {spec}, which is no one box on each rank. Save and load it "
            f"by consistent.checkpoint, or box it first: x.to_global(sbp={spec.plain.sbp})."
        )
    starts, sizes = spec.region(coordinate)
    return (starts, sizes) if 0 not in sizes else None


def write_items(x: Any, fqn: str, _: Any = None) -> list[Any]:
    """Implement ``__create_write_items__``: list what this rank saves of ``x``, 0 or 1 items.

    ``fqn`` is the name of the tensor in the state dict.
    """
    _check_no_partial(x._spec, fqn)
    return items_of(x._spec, fqn)


def items_of(spec: TensorSpec, fqn: str) -> list[Any]:
    """Return what ``write_items`` returns, for a spec without its tensor; the spec has no P."""
    return _write_items_of_box(fqn, spec.shape, spec.dtype, box_of(spec))


def _write_items_of_box(
    fqn: str, shape: torch.Size, dtype: torch.dtype, box: Box | None
) -> list[Any]:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if box is None:
        return []
    start, size = map(torch.Size, box)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(start, size),
        properties=TensorProperties(dtype=dtype),
        size=shape,
    )
    return [WriteItem(index=MetadataIndex(fqn, start), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_list(x: Any) -> list[Any]:
    """Implement ``__create_chunk_list__``: list what this rank loads of ``x``, 0 or 1 chunks."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    _check_no_partial(x._spec, "the tensor to load into")
    if x._moved_view:
        raise RuntimeError(  # no ValueError, which torch would hide
            f"checkpoint: the tensor to load into is {x._spec}, a view that boxing had to copy, "
            "and its base would not get the values. Load into the base, or into x.clone()."
        )
    box = box_of(x._spec) if x._spec.numel else None
    return [] if box is None else [ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))]


def tensor_shard(x: Any, index: Any) -> torch.Tensor:
    """Implement ``__get_tensor_shard__``: return this rank's shard, to be read or written.

    ``index`` says where in the tensor the checkpoint expects it.
    """
    box = box_of(x._spec)
    if box is None or (index.offset is not None and tuple(index.offset) != box[0]):
        raise ValueError(
            f"checkpoint: {index.fqn} is {x._spec}, of which this rank holds "
            f"{'nothing' if box is None else f'the box at {box[0]}'}, and not one at "
            f"{tuple(index.offset or ())}. Plan and carry out a save or load with the same tensors."
        )
    shard = plain(refresh(x)).detach()
    return shard if x._spec.numel else shard.new_empty(x._spec.shape)


class ShardCopy(torch.Tensor):
    """Copy on the CPU of a global tensor's shard, for an asynchronous save.

    Another thread or process writes it to the file later. It is a plain tensor that also knows
    which region of which tensor it is, so it takes part in the same protocol.
    """

    _write_spec: tuple[torch.Size, torch.dtype, Box | None]

    def __create_write_items__(self, fqn: str, _: Any = None) -> list[Any]:
        return _write_items_of_box(fqn, *self._write_spec)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def copy_of_shard(x: Any) -> ShardCopy:
    """Copy this rank's shard to the CPU for an asynchronous save, before the program changes it."""
    spec = x._spec
    _check_no_partial(spec, "the tensor to save")
    box = box_of(spec)
    shape = (0,) if box is None else box[1]
    copy: Any = torch.empty(shape, dtype=spec.dtype)
    if box is not None and spec.numel:
        copy.copy_(plain(refresh(x)).detach())
    copy = copy.as_subclass(ShardCopy)
    copy._write_spec = (spec.shape, spec.dtype, box)
    return copy


def _check_no_partial(spec: TensorSpec, what: str) -> None:
    if any(entry.is_partial for entry in spec.sbp):
        raise RuntimeError(
            f"checkpoint: {what} is {spec}, of which each rank holds an addend, and a file holds "
            "the sum. Reduce it first: x.to_global(sbp=B)."
        )
