"""Which rank writes which piece: the plan of ``torch.distributed.checkpoint``, made on every rank.

Each rank says which pieces it has. What several ranks have is written by the one with the fewest
bytes so far, so that replicated tensors are spread evenly. All ranks work this out by themselves
from what all have said.
"""

from __future__ import annotations

import dataclasses
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

from ...dispatch.plans.shards import is_global
from ...tensor.storage.in_checkpoints import items_of
from ..agreement import CheckpointError
from ..contents.collect import Contents, digests
from ..contents.stored import on_rank, without_rank


@dataclass(frozen=True)
class Note:
    """What a rank tells the others before a save."""

    pieces: list[WriteItem]
    digests: dict[str, int]
    kinds: dict[str, str]
    aliases: dict[str, str]
    options: tuple[Any, ...]


@dataclass(frozen=True)
class Plan:
    """What all ranks write.

    Args:
        tensors: the tensors of the checkpoint and their pieces.
        mine: the pieces that this rank writes.
        differing: values and plain tensors that differ between ranks, each saved of every rank.
    """

    tensors: Metadata
    mine: list[WriteItem]
    differing: list[str]


def note_of(contents: Contents, options: tuple[Any, ...]) -> Note:
    """What this rank has. Nothing is sent."""
    pieces: list[WriteItem] = []
    for name, x in contents.tensors.items():
        if is_global(x):
            spec: Any = x._spec  # type: ignore[attr-defined]
            pieces += items_of(spec.settled, name)
        else:
            pieces += create_default_local_save_plan({name: x.detach()}, False).items
    return Note(pieces, digests(contents), contents.kinds, contents.aliases, options)


def check_alike(call: str, notes: list[Note]) -> None:
    """Raise CheckpointError if the ranks are about to save different things."""
    for rank, note in enumerate(notes):
        for what, of in (
            ("names", lambda n: sorted(n.kinds.items())),
            ("tensors and values", lambda n: sorted(n.digests)),
            ("further names of tensors", lambda n: sorted(n.aliases.items())),
            ("folder, step, keep and wait", lambda n: n.options),
        ):
            first, own = of(notes[0]), of(note)
            if first != own:
                only = [x for x in own if x not in first], [x for x in first if x not in own]
                raise CheckpointError(
                    f"{call}: the ranks give different {what}: only rank {rank} has {only[0]}, "
                    f"only rank 0 has {only[1]}. Call it alike on every rank."
                )


def plan_of(notes: list[Note], rank: int) -> Plan:
    """What is written by whom. The same on every rank but for ``mine``."""
    first = notes[0].digests
    differing = [k for k in first if any(note.digests[k] != first[k] for note in notes)]
    tensors = {k.removeprefix("tensor ") for k in differing if k.startswith("tensor ")}
    plans = [
        SavePlan([_of_rank(item, r) if item.index.fqn in tensors else item for item in note.pieces])
        for r, note in enumerate(notes)
    ]
    plans, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    names = [k.partition(" ")[2] for k in differing]
    return Plan(metadata, list(plans[rank].items), names)


def _of_rank(item: WriteItem, rank: int) -> WriteItem:
    index = dataclasses.replace(item.index, fqn=on_rank(item.index.fqn, rank))
    return dataclasses.replace(item, index=index)


def data_of(item: WriteItem, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The piece that this rank is to write, as a plain tensor that shares storage."""
    name = item.index.fqn if item.index.fqn in tensors else without_rank(item.index.fqn)
    found = find_state_dict_object(
        {name: tensors[name].detach()}, dataclasses.replace(item.index, fqn=name)
    )
    return found.to_local() if hasattr(found, "to_local") else found
