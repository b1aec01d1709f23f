"""One save: the part that each rank writes, and what rank 0 does when all ranks have written."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ..files import index as index_file
from ..files import pieces as piece_files
from ..files.index import Index
from ..files.pieces import Location
from . import folders
from .folders import UnfinishedCheckpoint

Part = dict[str, Any]  # what a rank has written, as JSON holds it


@dataclass
class SaveJob:
    """The work of this rank in one save: what it writes, and what the index is made of.

    Args:
        checkpoint: the paths of the checkpoint.
        rank, ranks: number of this rank, and of ranks.
        step, keep: as in ``save``.
        tensors: the tensors of the checkpoint and their pieces.
        own_pieces: (piece, its name in the file, its values) of each piece that this rank writes.
        values, kinds, aliases: as in ``Contents``.
        differing: names of values and tensors of which each rank's version is saved.
    """

    checkpoint: UnfinishedCheckpoint
    rank: int
    ranks: int
    step: int | None
    keep: int | None
    tensors: Metadata
    own_pieces: list[tuple[MetadataIndex, str, torch.Tensor]]
    values: dict[str, str]
    kinds: dict[str, str]
    aliases: dict[str, str]
    differing: list[str]


def write_part(job: SaveJob) -> Part:
    """Write this rank's pieces to its file, and wait until they are on disk.

    Returns a description of the file, for the index that rank 0 writes.
    """
    file = f"rank-{job.rank:05}.safetensors"
    places: list[Location] = []
    if job.own_pieces:
        path = job.checkpoint.file(file)
        try:
            places = piece_files.write(path, [(name, x) for _, name, x in job.own_pieces])
        except FileNotFoundError:
            raise OSError(
                f"{os.path.abspath(job.checkpoint.temporary_path)}, which rank 0 has made, is not "
                f"there on {socket.gethostname()}. The folder must be on a file system that all "
                "ranks share, and nobody may remove it meanwhile."
            ) from None
    job_values = {name: job.values[name] for name in job.differing if name in job.values}
    size = os.path.getsize(job.checkpoint.file(file)) if job.own_pieces else 0
    pieces = [
        [index.fqn, list(index.offset or ()), where.at, where.nbytes, list(where.checksums or ())]
        for (index, _, _), where in zip(job.own_pieces, places, strict=True)
    ]
    job.own_pieces = []  # frees the copies
    return {"file": file, "size": size, "pieces": pieces, "values": job_values}


def complete(job: SaveJob, parts: list[Part]) -> None:
    """Write the index and give the folder its final name; rank 0 calls it when all have written.

    ``parts`` are what ``write_part`` returned on each rank.
    """
    index = Index(
        job.tensors,
        values={k: json.loads(v) for k, v in job.values.items()},
        kinds=job.kinds,
        differing=job.differing,
        aliases=job.aliases,
        ranks=job.ranks,
        step=job.step,
        serial=job.checkpoint.serial,
    )
    # The plan, and these metadata, are reused by later saves: drop the locations of an earlier one.
    job.tensors.storage_data = {}
    for part in parts:
        _add_part_to_index(job, index, part)
    for name in job.differing:
        if name in index.values:
            index.values[name] = [json.loads(part["values"][name]) for part in parts]
    index_file.write(job.checkpoint.file(index_file.NAME), index)
    folders.finish(job.checkpoint, job.keep)


def _add_part_to_index(job: SaveJob, index: Index, part: Part) -> None:
    if not part["pieces"]:
        return
    file = part["file"]
    path = job.checkpoint.file(file)
    actual_size = os.path.getsize(path) if os.path.exists(path) else -1
    if actual_size != part["size"]:
        raise OSError(
            f"{path} has {part['size']} bytes where it was written, and rank 0 sees "
            f"{'no such file' if actual_size < 0 else actual_size}. The folder must be on a file "
            "system that all ranks share."
        )
    index.files[file] = actual_size
    for name, offset, at, nbytes, checksums in part["pieces"]:
        where = Location(file, at, nbytes, tuple(checksums))
        index.tensors.storage_data[MetadataIndex(name, offset)] = where
