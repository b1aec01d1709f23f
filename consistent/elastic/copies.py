"""The copies of the training state after the last finished step, which each rank keeps.

```
            step 7            barrier      step 8              barrier      step 9
rank 0   ... forward, ...  prepare | take    ... forward, ...  prepare | take
rank 1   ... forward, ...  prepare | take    ... forward, ...  prepare | (gives up)
```

``prepare`` lists the tensors to copy, and may raise. Then the ranks wait for each other in a
barrier. ``take`` copies, and does not communicate. A rank that has called ``take`` knows that all
ranks have called ``prepare``. So if a step is abandoned between the two calls, as by rank 1, there
are two cases. Either no rank has called ``take``, and all go back to the copies of step 7. Or the
ranks that have not called it do so now (``settle``), and all continue after step 8.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import gathered
from mirrored.transports.default import current

from ..checkpoint.contents.collect import Contents, collect
from ..checkpoint.contents.random_state import RandomState
from ..checkpoint.saving.copies import Copies as Memory
from ..dispatch.plans.shards import HookOff, is_global, plain
from ..dispatch.running.moved_views import fresh
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
    """Cached result of ``PeerCopies._piece`` for the tensor ``x``, from the last ``prepare``.

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
        once: dtype -> the pieces that this rank sends to the next rank.
        coming: dtype -> the pieces that this rank receives from the rank before.
    """

    notes: list[bytes]
    once: dict[torch.dtype, list[Piece]]  # only this rank holds them
    coming: dict[torch.dtype, list[Piece]]  # only the rank before holds them


@dataclass
class Copy:
    """The training state of one step, which a rank keeps once all ranks have finished the step.

    Attributes:
        version: the step, and the number of the world (set of ranks) in which it was kept.
        contents: the values that are no tensors, and how objects and tensors are named.
        pieces: name -> this rank's part of a tensor, with its values.
        of_peers: parts that only the rank before this one has, with their values.
    """

    version: Version
    contents: Contents
    pieces: dict[str, tuple[Piece, torch.Tensor]]
    of_peers: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)  # of another rank

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of this rank's own parts, and of the parts of another rank."""
        own, of_peers = self.pieces.values(), self.of_peers
        return sum(x.nbytes for _, x in own), sum(x.nbytes for _, x in of_peers)


class PeerCopies:
    """The copies of the training state that this rank keeps, to continue if another rank is lost.

    At the end of a step each rank calls ``prepare``, then all ranks wait for each other, and then
    each calls ``take``. If a rank is lost in between, ``settle`` decides which copy counts.

    Attributes:
        kept: the copy of the last step that all ranks have finished; None before the first.
        prepared: the copy that ``take`` will make ``kept``; None outside the end of a step.
    """

    def __init__(self, peers: bool) -> None:
        self.kept: Copy | None = None
        self.prepared: Copy | None = None
        self._peers = peers
        self._boxes: dict[TensorSpec, Box | None] = {}  # of this rank, in this world
        self._memory = Memory()
        self._found: dict[str, LastPiece] = {}  # name -> tensor at the last call of ``prepare``
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
        before, self._found, pieces = self._found, {}, {}
        with HookOff():  # else each attribute of a global tensor would be a dispatched call
            places = {name: _place(x) for name, x in contents.tensors.items()}
        for name, x in contents.tensors.items():
            found, place = before.get(name), places[name]
            same = found is not None and found.x is x and found.place == place
            if found is None or not same or "_moved_view" in x.__dict__:
                found = LastPiece(x, place, self._piece(name, x))
            self._found[name] = found
            if found.piece is not None:
                pieces[name] = found.piece
        self.prepared = Copy(version, contents, pieces)
        if self._peers and current().size > 1:
            self.prepared.of_peers = self._of_rank_before(list(pieces.values()))

    def take(self) -> None:
        """Copy the prepared state to separate memory and keep the copy, without communication."""
        found, self.prepared = self.prepared, None
        assert found is not None
        # The memory of the last copy is overwritten: if copying raises, no copy is whole.
        self.kept = None
        held = self._memory.of([x for _, x in found.pieces.values()])
        found.pieces = {
            name: (piece, copy)
            for (name, (piece, _)), copy in zip(found.pieces.items(), held, strict=True)
        }
        # Only the copies are needed from here on; do not keep the tensors alive.
        found.contents.tensors.clear()
        self.kept = found

    def settle(self, kept_by_others: list[Version | None]) -> None:
        """Decide which copy is valid after a step was abandoned between ``prepare`` and ``take``.

        The prepared copy is taken if another rank has taken it, and dropped otherwise.

        Args:
            kept_by_others: the version of the copy that each rank keeps.
        """
        self._boxes, self._found, self._plan = {}, {}, None
        if self.prepared is not None and self.prepared.version in kept_by_others:
            self.take()
        self.prepared = None

    def _of_rank_before(
        self, own: list[tuple[Piece, torch.Tensor]]
    ) -> list[tuple[Piece, torch.Tensor]]:
        """Return copies of the pieces that only the rank before this one has; a collective.

        If that rank is lost, its state is restored from these copies. The last rank counts as the
        rank before the first.

        Args:
            own: the pieces of this rank, with their values.
        """
        size = current().size
        everyone = tuple(range(size))
        mine = [piece for piece, _ in own if piece.box is not None]
        # Python's hash differs by process; a rank's hash is compared with its own earlier one only.
        note = hash(tuple(mine)).to_bytes(8, "little", signed=True)
        notes = current().gather_notes(note, everyone)
        # All ranks take the same branch, as each has seen the same notes since the world began.
        if self._plan is None or self._plan.notes != notes:
            self._plan = _plan(notes, mine)
        # One tensor for each dtype, because each tensor that is sent has an overhead.
        plan, after, before = self._plan, (current().rank + 1) % size, (current().rank - 1) % size
        held = dict(own)
        sends = [
            # To the CPU one by one: joined on a GPU, they would need as much of its memory again.
            (after, torch.cat([held[piece].reshape(-1).cpu() for piece in pieces]))
            for pieces in plan.once.values()
        ]
        receives = [
            (before, (sum(map(_numel, pieces)),), dtype) for dtype, pieces in plan.coming.items()
        ]
        got = current().exchange(sends, receives, everyone)
        return [
            (piece, part.view(_size(piece)))
            for x, pieces in zip(got, plan.coming.values(), strict=True)
            for piece, part in zip(pieces, x.split([*map(_numel, pieces)]), strict=True)
        ]

    def _piece(self, name: str, x: Any) -> tuple[Piece, torch.Tensor] | None:
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
        shard = plain(fresh(x)).detach()
        shard = shard if spec.numel else shard.new_empty(spec.shape)
        return Piece(name, tuple(spec.shape), spec.dtype, box), shard


def _place(x: Any) -> tuple[Any, ...]:
    """Return address and memory layout of this rank's part of ``x``, to see if they changed."""
    if is_global(x):
        return x.data_ptr(), x._spec
    return x.data_ptr(), x.shape, x.stride()


def _plan(notes: list[bytes], own: list[Piece]) -> CopiesPlan:
    """Return the plan by which ranks send the pieces that one rank alone holds. A collective.

    Args:
        notes: a hash of each rank's pieces, which is stored with the plan.
        own: the pieces of this rank.
    """
    told = gathered(own)
    count = Counter((piece.name, piece.box) for pieces in told for piece in pieces)
    once = [[p for p in pieces if count[p.name, p.box] == 1] for pieces in told]
    rank = current().rank
    return CopiesPlan(notes, _by_dtype(once[rank]), _by_dtype(once[rank - 1]))


def _by_dtype(pieces: list[Piece]) -> dict[torch.dtype, list[Piece]]:
    found: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.dtype, []).append(piece)
    return found


def _size(piece: Piece) -> tuple[int, ...]:
    """Return the shape of a part of a global tensor, from its ``Piece``."""
    assert piece.box is not None
    return tuple(piece.box[1])


def _numel(piece: Piece) -> int:
    return math.prod(_size(piece))
