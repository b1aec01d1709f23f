"""Readers of checkpoints, for ``torch.distributed.checkpoint`` and for this library.

A reader has the index of a checkpoint, and reads any box of any piece. Each format has its own
reader: that of this library's format is here (``open_own_format``), others are in ``dcp.py`` and
``foreign.py``.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .. import checked
from . import index as index_file
from .index import Index
from .pieces import Location, read

Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts, sizes


class Reader(StorageReader):
    """A checkpoint that is open for reading.

    It is also a ``storage_reader`` for ``torch.distributed.checkpoint.load``.
    """

    def __init__(self, index: Index) -> None:
        self.index = index

    @abstractmethod
    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        """Read a part of a stored piece of a tensor into CPU memory; implemented for each format.

        Args:
            stored: the entry of the index for the piece.
            chunk: the region of the tensor that the piece is.
            box: (starts, sizes) of the part, within the piece.
        """

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager in which files stay open from one call of ``piece`` to the next.

        The default does nothing.
        """
        yield

    # -- what torch.distributed.checkpoint calls ---------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: no state is kept from one load to the next (method of ``StorageReader``)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the stored tensors."""
        return self.index.tensors

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: reading needs no preparation."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read each item of the plan from the files into the planner's tensors.

        The result is a future that is done already.
        """
        with self.reading():
            for item in plan.items:
                stored = item.storage_index
                metadata: Any = self.index.tensors.state_dict_metadata[stored.fqn]
                chunk = next(c for c in metadata.chunks if c.offsets == stored.offset)
                values = self.piece(
                    stored, chunk, (tuple(item.storage_offsets), tuple(item.lengths))
                )
                target = planner.resolve_tensor(item).detach()
                with torch.no_grad():
                    target.copy_(values)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Return whether the path exists."""
        return os.path.exists(checkpoint_id)


def plan_load(reader: Reader, targets: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Plan what this rank reads to fill ``targets``; return the arguments of ``read_data``.

    These are (plan, planner), made by torch's own ``DefaultLoadPlanner``. The keys of ``targets``
    are the tensors' names in the checkpoint.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, reader.index.tensors)  # type: ignore[arg-type]
    return planner.create_local_plan(), planner


class SafetensorsReader(Reader):
    """Reader of checkpoints whose data files are safetensors files in one ``folder``."""

    def __init__(self, folder: str, index: Index) -> None:
        super().__init__(index)
        self._folder = folder
        self._open_files: dict[str, BinaryIO] | None = None
        self._exit_stack = ExitStack()

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        where: Location = self.index.location_of(stored)
        metadata: Any = self.index.tensors.state_dict_metadata[stored.fqn]
        with self.reading():
            return read(
                self._open_file(where.file), where, metadata.properties.dtype, chunk.sizes, box
            )

    def _open_file(self, name: str) -> BinaryIO:
        assert self._open_files is not None
        if name not in self._open_files:
            path = os.path.join(self._folder, name)
            self._open_files[name] = self._exit_stack.enter_context(checked.open_plain_file(path))
        return self._open_files[name]

    @contextmanager
    def reading(self) -> Iterator[None]:
        if self._open_files is not None:  # nested: the outer context closes the files
            yield
            return
        self._open_files = {}
        try:
            with self._exit_stack:
                yield
        finally:
            self._open_files = None


def open_own_format(folder: str) -> Reader:
    """Open a checkpoint folder that this library's ``save`` wrote.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    return SafetensorsReader(folder, index_file.read(os.path.join(folder, index_file.NAME)))


def add_unsharded(metadata: Metadata, key: str, shape: Any, dtype: torch.dtype, place: Any) -> None:
    """Add a tensor that is stored in one piece to ``metadata``.

    ``key`` is its name, and ``place`` what the reader of this format needs to find it.
    """
    origin = torch.Size([0] * len(shape))
    metadata.state_dict_metadata[key] = TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(shape),
        [ChunkStorageMetadata(origin, torch.Size(shape))],
    )
    metadata.storage_data[MetadataIndex(key, origin)] = place


def narrow_to_box(x: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of the box (starts, sizes) of ``x``."""
    for d, (start, size) in enumerate(zip(*box, strict=True)):
        x = x.narrow(d, start, size)
    return x
