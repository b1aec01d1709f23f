"""Restore objects from the copies that ranks keep, in any layout and on any number of ranks.

A rank receives each part that it needs and does not have from one rank that has it, and nothing
else is sent.

The copies of all ranks together are a checkpoint in memory, and are loaded in the same way as a
checkpoint in files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ..checkpoint.contents.put_back import Loading
from ..checkpoint.contents.random_state import RandomState
from ..checkpoint.contents.stored import Stored, on_rank
from ..checkpoint.files.index import Index
from ..checkpoint.files.pieces import bytes_of
from ..checkpoint.files.reader import Box, Reader, narrow_to_box, plan_load
from .copies import Copy, Piece, Version

Key = tuple[str, tuple[int, ...]]  # name and offset of a piece


@dataclass(frozen=True)
class CopiesNote:
    """Description of the copies that a rank keeps, which it sends to the other ranks.

    Attributes:
        version: the step, and the number of the world (set of ranks) in which it was kept.
        values, kinds, aliases: as in ``Contents``.
        pieces: descriptions of the parts of tensors that are the rank's own.
        peer_pieces: descriptions of the parts that it keeps for the rank before it.
        digests: name -> a checksum of a plain tensor, to see whether ranks have the same.
    """

    version: Version
    values: dict[str, str]
    kinds: dict[str, str]
    aliases: dict[str, str]
    pieces: list[Piece]
    peer_pieces: list[Piece]
    digests: dict[str, int]  # of plain tensors


def note_of(last_copy: Copy | None) -> CopiesNote | None:
    """Return a description of ``last_copy`` to send to the other ranks; None if it is None."""
    if last_copy is None:
        return None
    contents = last_copy.contents
    pieces = [piece for piece, _ in last_copy.pieces.values()]
    digests = {
        piece.name: crc32(bytes_of(x))
        for piece, x in last_copy.pieces.values()
        if piece.box is None
    }
    of_peers = [piece for piece, _ in last_copy.peer_pieces]
    return CopiesNote(
        last_copy.version,
        contents.values,
        contents.kinds,
        contents.aliases,
        pieces,
        of_peers,
        digests,
    )


class CopiesReader(Reader):
    """The copies of all ranks, as a checkpoint that is open for reading.

    Attributes:
        missing: names of tensors that are incomplete, because no rank keeps a part of them.
        received: bytes that this rank received from others.
    """

    def __init__(self, notes: list[CopiesNote | None], own: Copy | None) -> None:
        first = next(i for i, note in enumerate(notes) if note is not None)
        self._first_keeper, self._own_copy = first, own
        self._holders: dict[Key, list[int]] = {}
        self._local_pieces: dict[Key, torch.Tensor] = {}
        self._received_pieces: dict[tuple[Key, Box], torch.Tensor] = {}
        self.received = 0
        super().__init__(self._make_index(notes))
        self.missing = sorted(_incomplete_tensors(self.index.tensors))

    def _make_index(self, notes: list[CopiesNote | None]) -> Index:
        """Return the index of all ranks' copies, in the form of the index of a checkpoint."""
        first_note: Any = notes[self._first_keeper]
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        differing = _differing_names(notes, first_note)
        for rank, note in enumerate(notes):
            for piece in () if note is None else (*note.pieces, *note.peer_pieces):
                self._add_piece(metadata, piece, rank, f"tensor {piece.name}" in differing)
        for name in [k.removeprefix("tensor ") for k in differing if k.startswith("tensor ")]:
            for rank, note in enumerate(notes):  # a rank without copies gets another rank's value
                if note is None:
                    self._add_alias_for_rank(metadata, name, rank)
        for alias, name in first_note.aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
        values = {name: json.loads(text) for name, text in first_note.values.items()}
        for name in [k.removeprefix("value ") for k in differing if k.startswith("value ")]:
            texts = [(note or first_note).values[name] for note in notes]
            values[name] = [json.loads(text) for text in texts]
        return Index(
            metadata,
            values=values,
            kinds=first_note.kinds,
            differing=[key.partition(" ")[2] for key in differing],
            aliases=first_note.aliases,
            ranks=len(notes),
        )

    def _add_piece(self, metadata: Metadata, piece: Piece, rank: int, differs: bool) -> None:
        """Add a piece that ``rank`` keeps to the index.

        Args:
            metadata: the metadata of the index, to which the piece is added.
            piece: the description of the piece.
            rank: the rank that keeps it.
            differs: whether the piece is a plain tensor whose value differs by rank. Then each
                rank's value is added under a name of its own.
        """
        name = on_rank(piece.name, rank) if differs else piece.name
        start, size = piece.box or ((0,) * len(piece.shape), piece.shape)
        key = name, tuple(start)
        if rank == current().rank:
            self._local_pieces[key] = self._own_values(piece)
        # A replicated piece is one chunk that several ranks can send.
        if key in self._holders:
            self._holders[key].append(rank)
            return
        self._holders[key] = [rank]
        entry: Any = metadata.state_dict_metadata.setdefault(
            name,
            TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(piece.shape), []),
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(size)))

    def _own_values(self, piece: Piece) -> torch.Tensor:
        """Return the values of ``piece``, which is this rank's own or kept for the rank before."""
        assert self._own_copy is not None
        own_piece, x = self._own_copy.pieces.get(piece.name, (None, None))
        if own_piece == piece and x is not None:
            return x
        return next(x for peer_piece, x in self._own_copy.peer_pieces if peer_piece == piece)

    def _add_alias_for_rank(self, metadata: Metadata, name: str, rank: int) -> None:
        """Let ``rank``, which has no copies, read the plain tensor ``name`` of a rank that has."""
        source, target = on_rank(name, self._first_keeper), on_rank(name, rank)
        metadata.state_dict_metadata[target] = metadata.state_dict_metadata[source]
        for key, holders in list(self._holders.items()):
            if key[0] == source:
                self._holders[target, key[1]] = holders
                if key in self._local_pieces:
                    self._local_pieces[target, key[1]] = self._local_pieces[key]

    # ---- reading --------------------------------------------------------------------------------

    def fetch(self, plan: Any) -> None:
        """Receive the pieces that this rank's load plan reads and this rank does not keep.

        A collective, called before ``read_data``, which then finds all pieces on this rank.

        Args:
            plan: this rank's load plan, of torch's distributed checkpoints.
        """
        requests = [
            (key, box) for item in plan.items for key, box in [self._key_and_box(item)]
            if key not in self._local_pieces
        ]  # fmt: skip
        requests = list(dict.fromkeys(requests))
        all_ranks = tuple(range(current().size))
        sends, receives, own_requests = [], [], []
        load = dict.fromkeys(all_ranks, 0)
        for rank, rank_requests in enumerate(gather_from_ranks(requests)):
            for key, box in rank_requests:
                # All ranks choose the same holder: the one with the fewest bytes to send so far.
                holder = min(self._holders[key], key=lambda r: (load[r], r))
                dtype = self._dtype(key[0])
                shape = box[1]
                load[holder] += torch.Size(shape).numel() * dtype.itemsize
                if holder == current().rank:
                    sends.append((rank, narrow_to_box(self._local_pieces[key], box).contiguous()))
                if rank == current().rank:
                    receives.append((holder, shape, dtype))
                    own_requests.append((key, box))
        if not any(load.values()):
            return
        received = current().exchange(sends, receives, all_ranks)
        self._received_pieces = dict(zip(own_requests, received, strict=True))
        self.received = sum(x.nbytes for x in received)

    def piece(self, stored: MetadataIndex, chunk: ChunkStorageMetadata, box: Box) -> torch.Tensor:
        key = self._key(stored)
        if key in self._local_pieces:
            return narrow_to_box(self._local_pieces[key], box)
        return self._received_pieces[key, box]

    def _key_and_box(self, item: Any) -> tuple[Key, Box]:
        box = tuple(item.storage_offsets), tuple(item.lengths)
        return self._key(item.storage_index), box

    def _key(self, stored: MetadataIndex) -> Key:
        name = self.index.aliases.get(stored.fqn, stored.fqn)
        return name, tuple(stored.offset or ())

    def _dtype(self, name: str) -> torch.dtype:
        entry: Any = self.index.tensors.state_dict_metadata[name]
        return entry.properties.dtype


def _differing_names(notes: list[CopiesNote | None], reference: CopiesNote) -> list[str]:
    """Return the values and plain tensors that differ between ranks.

    For example ``["value losses", "tensor model.step"]``.

    Args:
        notes: what each rank keeps; None for a rank that keeps nothing.
        reference: one of them, whose entries are compared with those of the others.
    """
    present_notes = [note for note in notes if note is not None]
    names = [
        f"value {k}"
        for k, text in reference.values.items()
        if any(n.values[k] != text for n in present_notes)
    ]
    tensors = [
        k
        for k, number in reference.digests.items()
        if any(n.digests[k] != number for n in present_notes)
    ]
    return names + [f"tensor {k}" for k in tensors]


def _incomplete_tensors(metadata: Metadata) -> set[str]:
    """Return the names of tensors of which some elements are kept by no rank.

    The elements of the kept pieces are counted, since pieces of one layout do not overlap.
    """
    names = set()
    for name, entry in metadata.state_dict_metadata.items():
        covered = sum(chunk.sizes.numel() for chunk in entry.chunks)  # type: ignore[union-attr]
        if covered != entry.size.numel():  # type: ignore[union-attr]
            names.add(name)
    return names


def load(kept: CopiesReader, objects: dict[str, Any]) -> dict[str, Any]:
    """Load the state that the ranks keep together into ``objects`` on every rank; a collective.

    Args:
        kept: the copies of all ranks.
        objects: name -> module, optimizer or other object with state.

    Returns:
        The kept values for which no object is given.
    """
    stored = Stored(kept.index, current().rank, current().size)
    loading = Loading(stored, {**objects, "random": RandomState()}, strict=True, cast=False)
    plan, planner = plan_load(kept, loading.targets)
    kept.fetch(plan)
    kept.read_data(plan, planner)
    return loading.update_objects()
