"""The copies of the training state after the last finished step, which each rank keeps.

```
            step 7            barrier        step 8              barrier        step 9
rank 0   ... forward, ...  prepare | commit    ... forward, ...  prepare | commit
rank 1   ... forward, ...  prepare | commit    ... forward, ...  prepare | (gives up)
```

``prepare`` lists the tensors to copy, and may raise. Then the ranks wait for each other in a
barrier. ``commit`` copies, and does not communicate. A rank that has called ``commit`` knows that
all ranks have called ``prepare``. So if a step is abandoned between the two calls, as by rank 1,
there are two cases. Either no rank has called ``commit``, and all go back to the copies of step 7.
Or the ranks that have not called it do so now (``settle``), and all continue after step 8.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ..checkpoint.contents.collect import Contents, collect
from ..checkpoint.contents.random_state import RandomState
from ..checkpoint.saving.copies import CopyBuffer as Memory
from ..dispatch.plans.shards import HookOff, is_global, plain
from ..dispatch.running.moved_views import refresh
from ..spec import TensorSpec
from ..tensor.storage.in_checkpoints import Box, box_of

# The step of a copy, and the number of the world (set of ranks) in which the copy was made.
Version = tuple[int, int]


class Piece(NamedTuple):
    """Description of this rank's part of a tensor, by which ranks tell each other what they hold.

    ``shape`` is that of the whole tensor. ``box`` is the region of it that the part covers, as
    (offsets, sizes); None for a plain tensor, of which each rank has its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None


class LastPiece(NamedTuple):
    """Cached result of ``PeerCopies._own_piece`` for the tensor ``x``, from the last ``prepare``.

    ``piece`` is reused as long as the tensor's memory and layout (``place``) are the same.
    """

    x: Any
    place: tuple[Any, ...]
    piece: tuple[Piece, torch.Tensor] | None


class CopiesPlan(NamedTuple):
    """Plan of an exchange in which each rank sends the next rank the pieces that it alone holds.

    The plan is used again at each step until a rank holds other pieces.

    Attributes:
        notes: a hash of each rank's pieces, to see whether the pieces of any rank have changed.
        to_send: dtype -> the pieces that this rank sends to the next rank.
        to_receive: dtype -> the pieces that this rank receives from the rank before.
    """

    notes: list[bytes]
    to_send: dict[torch.dtype, list[Piece]]  # only this rank holds them
    to_receive: dict[torch.dtype, list[Piece]]  # only the rank before holds them


@dataclass
class Copy:
    """The training state of one step, which a rank keeps once all ranks have finished the step.

    Attributes:
        version: the step, and the number of the world (set of ranks) in which it was kept.
        contents: the values that are no tensors, and how objects and tensors are named.
        pieces: name -> this rank's part of a tensor, with its values.
        peer_pieces: parts that only the rank before this one has, with their values.
    """

    version: Version
    contents: Contents
    pieces: dict[str, tuple[Piece, torch.Tensor]]
    peer_pieces: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)  # of another rank

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of this rank's own parts, and of the parts of another rank."""
        own, of_peers = self.pieces.values(), self.peer_pieces
        return sum(x.nbytes for _, x in own), sum(x.nbytes for _, x in of_peers)


class PeerCopies:
    """The copies of the training state that this rank keeps, to continue if another rank is lost.

    At the end of a step each rank calls ``prepare``, then all ranks wait for each other, and then
    each calls ``commit``. If a rank is lost in between, ``settle`` decides which copy counts.

    Attributes:
        last_copy: the copy of the last step that all ranks have finished; None before the first.
        prepared: the copy that ``commit`` will make ``last_copy``; None outside the end of a step.
    """

    def __init__(self, peers: bool) -> None:
        self.last_copy: Copy | None = None
        self.prepared: Copy | None = None
        self._copies_peers = peers
        self._boxes: dict[TensorSpec, Box | None] = {}  # of this rank, in this world
        self._memory = Memory()
        # Name -> tensor at the last call of ``prepare``.
        self._last_pieces: dict[str, LastPiece] = {}
        self._plan: CopiesPlan | None = None  # of the last exchange with peers, in this world

    def prepare(self, version: Version, objects: dict[str, Any]) -> None:
        """List the tensors of ``objects`` to copy at the end of a step; nothing is copied yet.

        If this object was made with ``peers``, the call is a collective, in which this rank also
        receives the parts that only the rank before it has, as a second copy of them.

        Args:
            version: (step, number of the world) of the state.
            objects: name -> module, optimizer or other object with state, or a value.

        Raises:
            TypeError, ValueError: an object cannot be kept.
        """
        contents = collect({**objects, "random": RandomState()})
        previous, self._last_pieces, pieces = self._last_pieces, {}, {}
        with HookOff():  # else each attribute of a global tensor would be a dispatched call
            places = {name: _address_and_layout(x) for name, x in contents.tensors.items()}
        for name, x in contents.tensors.items():
            last, place = previous.get(name), places[name]
            is_unchanged = last is not None and last.x is x and last.place == place
            if last is None or not is_unchanged or "_moved_view" in x.__dict__:
                last = LastPiece(x, place, self._own_piece(name, x))
            self._last_pieces[name] = last
            if last.piece is not None:
                pieces[name] = last.piece
        self.prepared = Copy(version, contents, pieces)
        if self._copies_peers and current().size > 1:
            self.prepared.peer_pieces = self._receive_peer_pieces(list(pieces.values()))

    def commit(self) -> None:
        """Copy the prepared state to separate memory and keep the copy, without communication."""
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        # The memory of the last copy is overwritten: if copying raises, no copy is whole.
        self.last_copy = None
        copies = self._memory.copy([x for _, x in prepared.pieces.values()])
        prepared.pieces = {
            name: (piece, copy)
            for (name, (piece, _)), copy in zip(prepared.pieces.items(), copies, strict=True)
        }
        # Only the copies are needed from here on; do not keep the tensors alive.
        prepared.contents.tensors.clear()
        self.last_copy = prepared

    def settle(self, kept_by_others: list[Version | None]) -> None:
        """Decide which copy is valid after a step was abandoned between ``prepare`` and ``commit``.

        The prepared copy is taken if another rank has taken it, and dropped otherwise.

        Args:
            kept_by_others: the version of the copy that each rank keeps.
        """
        self._boxes, self._last_pieces, self._plan = {}, {}, None
        if self.prepared is not None and self.prepared.version in kept_by_others:
            self.commit()
        self.prepared = None

    def _receive_peer_pieces(
        self, own_pieces: list[tuple[Piece, torch.Tensor]]
    ) -> list[tuple[Piece, torch.Tensor]]:
        """Return copies of the pieces that only the rank before this one has; a collective.

        If that rank is lost, its state is restored from these copies. The last rank counts as the
        rank before the first.

        Args:
            own_pieces: the pieces of this rank, with their values.
        """
        size = current().size
        all_ranks = tuple(range(size))
        sharded = [piece for piece, _ in own_pieces if piece.box is not None]
        # Python's hash differs by process; a rank's hash is compared with its own earlier one only.
        note = hash(tuple(sharded)).to_bytes(8, "little", signed=True)
        notes = current().gather_notes(note, all_ranks)
        # All ranks take the same branch, as each has seen the same notes since the world began.
        if self._plan is None or self._plan.notes != notes:
            self._plan = _plan_exchange(notes, sharded)
        # One tensor for each dtype, because each tensor that is sent has an overhead.
        plan, target, source = self._plan, (current().rank + 1) % size, (current().rank - 1) % size
        values = dict(own_pieces)
        sends = [
            # To the CPU one by one: joined on a GPU, they would need as much of its memory again.
            (target, torch.cat([values[piece].reshape(-1).cpu() for piece in pieces]))
            for pieces in plan.to_send.values()
        ]
        receives = [
            (source, (sum(map(_numel, pieces)),), dtype)
            for dtype, pieces in plan.to_receive.items()
        ]
        received = current().exchange(sends, receives, all_ranks)
        return [
            (piece, part.view(_piece_shape(piece)))
            for x, pieces in zip(received, plan.to_receive.values(), strict=True)
            for piece, part in zip(pieces, x.split([*map(_numel, pieces)]), strict=True)
        ]

    def _own_piece(self, name: str, x: Any) -> tuple[Piece, torch.Tensor] | None:
        """Return this rank's part of the tensor ``x``, and its values; None if it has no part.

        Raises:
            ValueError: ``x`` is a partial sum (P).
        """
        if not is_global(x):
            return Piece(name, tuple(x.shape), x.dtype, None), x.detach()
        spec: TensorSpec = x._spec
        if spec.settled is not spec:
            raise ValueError(
                f"elastic: {name} is {spec}, of which each rank holds an addend. Keep its sum, "
                "x.to_global(sbp=B)."
            )
        if spec not in self._boxes:
            self._boxes[spec] = box_of(spec)
        box = self._boxes[spec]
        if box is None:
            return None
        shard = plain(refresh(x)).detach()
        shard = shard if spec.numel else shard.new_empty(spec.shape)
        return Piece(name, tuple(spec.shape), spec.dtype, box), shard


def _address_and_layout(x: Any) -> tuple[Any, ...]:
    """Return address and memory layout of this rank's part of ``x``, to see if they changed."""
    if is_global(x):
        return x.data_ptr(), x._spec
    return x.data_ptr(), x.shape, x.stride()


def _plan_exchange(notes: list[bytes], own_pieces: list[Piece]) -> CopiesPlan:
    """Return the plan by which ranks send the pieces that one rank alone holds. A collective.

    Args:
        notes: a hash of each rank's pieces, which is stored with the plan.
        own_pieces: the pieces of this rank.
    """
    all_pieces = gather_from_ranks(own_pieces)
    count = Counter((piece.name, piece.box) for pieces in all_pieces for piece in pieces)
    unique = [[p for p in pieces if count[p.name, p.box] == 1] for pieces in all_pieces]
    rank = current().rank
    return CopiesPlan(notes, _group_by_dtype(unique[rank]), _group_by_dtype(unique[rank - 1]))


def _group_by_dtype(pieces: list[Piece]) -> dict[torch.dtype, list[Piece]]:
    groups: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.dtype, []).append(piece)
    return groups


def _piece_shape(piece: Piece) -> tuple[int, ...]:
    """Return the shape of a part of a global tensor, from its ``Piece``."""
    assert piece.box is not None
    return tuple(piece.box[1])


def _numel(piece: Piece) -> int:
    return math.prod(_piece_shape(piece))
