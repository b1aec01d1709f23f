"""Reading a checkpoint into objects of any layout, on any number of ranks (``load``)."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from mirrored.transports.default import current

from .agreement import CheckpointError, from_rank_0, on_every_rank
from .contents.put_back import Loading
from .contents.random_state import RandomState
from .contents.stored import Stored
from .files.index import stamp_of
from .files.opened import opened
from .files.reader import Reader, plan_load
from .save import wait_for_last
from .saving import folders


def load(
    path: str | os.PathLike,
    /,
    *,
    strict: bool = True,
    cast: bool = False,
    random: bool = True,
    **objects: Any,
) -> dict[str, Any]:
    """Read a checkpoint into objects. A collective of all ranks of the world.

    Each rank reads its own pieces of each tensor, whatever layout and number of ranks wrote them.
    No file is read by unpickling objects.

    Args:
        path: a folder of checkpoints, of which the latest is read, or one checkpoint: of ``save``,
            of ``torch.distributed.checkpoint`` (FSDP2, DTensor), a file of ``torch.save``, or a
            file or folder of safetensors.
        strict: raise if a module has a tensor that the checkpoint lacks, or the checkpoint one that
            the module lacks. With False such tensors are left as they are.
        cast: accept a tensor whose dtype in the checkpoint is not the module's, and convert it.
        random: restore the states of the random generators, if the checkpoint has them.
        objects: modules, optimizers and other objects with ``load_state_dict``, by the names under
            which they were saved. A tensor, or a list or dictionary of tensors, is overwritten in
            place.

    Returns:
        The saved values for which no object is given, such as ``"step"``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged, or does not fit; the message names every tensor
            that does not fit. If damage is found only while tensors are read, some of them have new
            values.
    """
    wait_for_last()
    what = f"checkpoint.load of {os.fspath(path)!r}"
    # Rank 0 chooses for all, since a new checkpoint may appear between the looks of two ranks.
    checkpoint_path = from_rank_0(what, lambda: _find_checkpoint(os.fspath(path)))
    loading: list[Loading] = []
    readers: list[Reader] = []

    def open_and_stamp() -> int:
        reader = _open_checkpoint(checkpoint_path)
        all_objects = dict(objects)
        if random and "random" not in all_objects and "random" in reader.index.kinds:
            all_objects["random"] = RandomState()
        stored = Stored(reader.index, current().rank, current().size)
        loading.append(Loading(stored, all_objects, strict, cast))
        readers.append(reader)
        return stamp_of(reader.index)

    _check_same_checkpoint(what, on_every_rank(what, open_and_stamp))
    on_every_rank(what, lambda: _read_tensors(readers[0], loading[0].targets))
    values: dict[str, Any] = {}
    on_every_rank(what, lambda: values.update(loading[0].update_objects()))
    return values


def latest(folder: str | os.PathLike) -> str | None:
    """Return the path of the checkpoint in ``folder`` that was saved last; None if there is none.

    A collective of all ranks.
    """
    wait_for_last()
    what = f"checkpoint.latest of {os.fspath(folder)!r}"
    return from_rank_0(what, lambda: folders.latest_in(os.fspath(folder)))


def _find_checkpoint(path: str) -> str:
    """Return the path of the checkpoint to read: the latest in ``path``, or ``path`` itself.

    Only rank 0 calls it, and all ranks use its result.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(
            "there is no such file or folder. Give the folder that was given to save, or a "
            "checkpoint in it."
        )
    return (os.path.isdir(path) and folders.latest_in(path)) or path


def _open_checkpoint(path: str) -> Reader:
    try:
        return opened(path)
    except FileNotFoundError:
        if current().rank == 0 or os.path.exists(path):
            raise
        raise ValueError(
            f"{os.path.abspath(path)}, which rank 0 sees, is not there on {socket.gethostname()}. "
            "It must be on a file system that all ranks share, or be copied to each host."
        ) from None


def _check_same_checkpoint(what: str, stamps: list[int]) -> None:
    """Raise CheckpointError if the ranks see different checkpoints at the same path.

    ``stamps`` has a number of each rank that identifies the checkpoint it sees, the same list on
    all ranks, so all raise or none. ``what`` begins the message.
    """
    differing_ranks = [rank for rank, stamp in enumerate(stamps) if stamp != stamps[0]]
    if differing_ranks:
        raise CheckpointError(
            f"{what}: rank {', '.join(map(str, differing_ranks))} and rank 0 see different "
            "checkpoints at this path. It must be on a file system that all ranks share, or hold "
            "copies of one checkpoint on each host."
        )


def _read_tensors(reader: Reader, targets: dict[str, torch.Tensor]) -> None:
    """Read tensors from the checkpoint into ``targets``, whose keys are their names in it."""
    reader.read_data(*plan_load(reader, targets))
