"""The plan of a save: which rank writes which piece, computed on every rank.

A piece is a part of a tensor that a rank has. Each rank announces its pieces. As in
``torch.distributed.checkpoint``, a piece that several ranks have is written by the rank with the
fewest bytes so far, so that replicated tensors are spread evenly. Every rank computes the plan from
the announcements of all.

A training run saves the same tensors again and again, and waits while a save is planned. So the
pieces are announced only if those of some rank have changed since the last announcement.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from mirrored.transports.default import current

from ...dispatch.plans.shards import is_global
from ...tensor.storage.in_checkpoints import items_of
from ..agreement import CheckpointError, on_every_rank
from ..contents.collect import Contents, digests
from ..contents.stored import on_rank, without_rank


@dataclass(frozen=True)
class Note:
    """Message of a rank to the others before a save, to find out what has changed or differs.

    Attributes:
        unchanged: None if this rank has other pieces of tensors than when the ranks last exchanged
            theirs. Otherwise a hash of the pieces that all ranks had then.
        digests: checksums of its values and plain tensors, by name.
        kinds, aliases: as in ``Contents``.
        options: the arguments of ``save`` that must be equal on all ranks.
    """

    unchanged: bytes | None
    digests: dict[str, int]
    kinds: dict[str, str]
    aliases: dict[str, str]
    options: tuple[Any, ...]


@dataclass(frozen=True)
class SaveDivision:
    """Plan of a save, as one rank sees it: which pieces of tensors it writes.

    Args:
        tensors: the tensors of the checkpoint and their pieces.
        own_pieces: the pieces that this rank writes.
        differing: names of values and plain tensors that differ between ranks; each rank's version
            is saved.
    """

    tensors: Metadata
    own_pieces: list[WriteItem]
    differing: list[str]


class Planner:
    """Planner of saves, which reuses the last plan if nothing has changed.

    For each save all ranks exchange their ``note_of`` and call ``exchange_pieces`` with the notes
    of all; then ``plan_of`` returns the plan.
    """

    def __init__(self) -> None:
        # Name and layout of each tensor that this rank saves: now, and at the last exchange of
        # pieces.
        self._current_layouts: list[tuple] = []
        self._announced_layouts: list[tuple] = []
        # The pieces of each rank, by that exchange.
        self._pieces_by_rank: list[list[WriteItem]] = []
        self._pieces_hash: bytes | None = None  # hash of ``_pieces_by_rank``
        self._last_plan: tuple[list[str], SaveDivision] | None = None  # what differed, and the plan

    def note_of(self, contents: Contents, options: tuple[Any, ...]) -> Note:
        """Return this rank's note about ``contents``, for the caller to exchange; sends nothing."""
        transport = current()
        tensors = [_layout_key(name, x) for name, x in contents.tensors.items()]
        self._current_layouts = [(transport.rank, transport.size), *tensors]
        unchanged = self._pieces_hash if self._current_layouts == self._announced_layouts else None
        return Note(unchanged, digests(contents), contents.kinds, contents.aliases, options)

    def exchange_pieces(self, what: str, contents: Contents, notes: list[Note]) -> None:
        """Exchange the lists of the tensor pieces that ranks have, if any rank's list has changed.

        It is a collective only if lists are exchanged. ``notes`` are the notes of all ranks,
        ``contents`` is what this rank saves, and ``what`` begins error messages.
        """
        # All ranks have the same notes here, so all of them take the same branch.
        hashes = {note.unchanged for note in notes}
        if len(hashes) == 1 and None not in hashes:
            return
        # Reset first: if the exchange fails, no stale plan is reused.
        self._pieces_hash = self._last_plan = None
        texts = on_every_rank(what, lambda: pickle.dumps(_pieces_of(contents)))
        self._pieces_by_rank = [pickle.loads(text) for text in texts]
        self._announced_layouts, self._pieces_hash = (
            self._current_layouts,
            hashlib.sha256(b"".join(texts)).digest(),
        )

    def plan_of(self, notes: list[Note], rank: int) -> SaveDivision:
        """Return the plan of this save for ``rank``, from the ``notes`` of all ranks.

        All ranks compute it alike, so that nothing is sent; only ``own_pieces`` differs between
        them.
        """
        first = notes[0].digests
        differing = [k for k in first if any(note.digests[k] != first[k] for note in notes)]
        # Values may start to differ between ranks while the pieces stay the same.
        if self._last_plan is None or self._last_plan[0] != differing:
            self._last_plan = differing, _make_plan(self._pieces_by_rank, differing, rank)
        return self._last_plan[1]


def _layout_key(name: str, x: torch.Tensor) -> tuple:
    if is_global(x):
        return name, x._spec  # type: ignore[attr-defined]
    # A DTensor's pieces also depend on its placements and mesh.
    distribution = repr((getattr(x, "placements", None), getattr(x, "device_mesh", None)))
    return name, x.shape, x.dtype, x.device, distribution


def _pieces_of(contents: Contents) -> list[WriteItem]:
    pieces: list[WriteItem] = []
    for name, x in contents.tensors.items():
        if is_global(x):
            spec: Any = x._spec  # type: ignore[attr-defined]
            pieces += items_of(spec.settled.plain, name)
        else:
            pieces += create_default_local_save_plan({name: x.detach()}, False).items
    return pieces


def check_equal_contents(call: str, notes: list[Note]) -> None:
    """Raise CheckpointError if the notes say that the ranks save different things.

    These are other names, tensors, aliases or options of ``save``; values may differ. ``call``
    begins the message.
    """
    for rank, note in enumerate(notes):
        for what, attribute in (
            ("names", lambda n: sorted(n.kinds.items())),
            ("tensors and values", lambda n: sorted(n.digests)),
            ("further names of tensors", lambda n: sorted(n.aliases.items())),
            ("folder, step, keep and wait", lambda n: n.options),
        ):
            first_value, own_value = attribute(notes[0]), attribute(note)
            if first_value != own_value:
                only = (
                    [x for x in own_value if x not in first_value],
                    [x for x in first_value if x not in own_value],
                )
                raise CheckpointError(
                    f"{call}: the ranks give different {what}: only rank {rank} has {only[0]}, "
                    f"only rank 0 has {only[1]}. Call it alike on every rank."
                )


def _make_plan(pieces: list[list[WriteItem]], differing: list[str], rank: int) -> SaveDivision:
    tensors = {k.removeprefix("tensor ") for k in differing if k.startswith("tensor ")}
    plans = [
        SavePlan(
            [_renamed_for_rank(item, r) if item.index.fqn in tensors else item for item in own]
        )
        for r, own in enumerate(pieces)
    ]
    plans, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    names = [k.partition(" ")[2] for k in differing]
    return SaveDivision(metadata, list(plans[rank].items), names)


def _renamed_for_rank(item: WriteItem, rank: int) -> WriteItem:
    index = dataclasses.replace(item.index, fqn=on_rank(item.index.fqn, rank))
    return dataclasses.replace(item, index=index)


def data_of(item: WriteItem, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the elements of the piece ``item``, which this rank writes.

    The result is a plain tensor, a view of this rank's shard where possible. ``tensors`` are all
    tensors to be saved, by name.
    """
    name = item.index.fqn if item.index.fqn in tensors else without_rank(item.index.fqn)
    data = find_state_dict_object(
        {name: tensors[name].detach()}, dataclasses.replace(item.index, fqn=name)
    )
    return data.to_local() if hasattr(data, "to_local") else data
