"""Compare what the ranks have read, before a batch is used.

Parts of a batch that do not fit together would give wrong numbers, or a hang.

Each rank summarizes its part of a batch in a note (``BatchNote``), and the ranks exchange checksums
of their notes. Only if the checksums differ are the notes themselves sent. Every rank sees all
checksums, so all take the same branch. For the first batches the notes are always sent, with a hash
of the values of each field, which must be equal on ranks that read the same items.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import agree, gather_from_ranks, lines_by_rank
from mirrored.transports.default import current

from .nested import Path, name_of

# Part of error messages: how to let every rank read whole batches, whichever call made the loader.
WHOLE = (
    "whole=True of consistent.data.loader, or of the Accelerator, GlobalStrategy or Trainer that "
    "makes the loader"
)


class Field(NamedTuple):
    """Description of one field of a batch, by which ranks check that their parts fit together.

    For images of 3x32x32 under the key "x" it is ``(("x",), "torch.float32", (3, 32, 32))``.

    Attributes:
        path: the keys that lead to the field.
        kind: the dtype of a tensor, otherwise a text that names the kind of value.
        sizes: the sizes that must agree between ranks: the shape, without the dim that counts items
            if each rank reads its own items.
        value: the value itself, if the whole batch has a single one; it must agree as well.
    """

    path: Path
    kind: str
    sizes: tuple[int, ...] = ()
    value: Any = None


@dataclass(frozen=True)
class BatchNote:
    """Summary of a rank's part of a batch, by which ranks check that their parts fit together.

    As a rule ranks exchange only checksums of their notes (``gather_if_different``).
    """

    kind: str  # "batch", "end" of the data or "error"
    order: int = 0  # checksum of the batch's indices
    count: int | None = None  # items of the batch, over all ranks
    fields: tuple[Field, ...] = ()
    error: str = ""
    stop: bool = False  # this rank was asked to stop
    share: int = 0  # number of this rank's share, equal on ranks that read the same items
    values: tuple[str, ...] | None = None  # a hash for each field; None if they are not compared
    cause: Exception | None = field(default=None, compare=False)  # of ``error``; is not sent


def gather_if_different(note: BatchNote) -> list[BatchNote] | None:
    """Return the notes of all ranks if any differ, otherwise None. A collective of the world.

    The ranks exchange checksums of their notes, and the notes only if these differ. Notes with
    ``values`` are always exchanged and returned; either all ranks' notes have values or none has.
    """
    transport = current()
    if transport.size == 1:
        return None
    ranks = tuple(range(transport.size))
    # The exception stays on its rank; its text is in ``error``.
    note = replace(note, cause=None)
    if note.values is not None:
        return gather_from_ranks(note)
    own_checksum = torch.tensor([zlib.crc32(repr(astuple(note)).encode())])
    checksums = transport.all_gather(own_checksum, [(1,)] * len(ranks), ranks)
    if all(int(each) == int(own_checksum) for each in checksums):
        return None
    return gather_from_ranks(note)


def check_notes(notes: list[BatchNote], sizes_may_differ: bool) -> None:
    """Raise the same error on every rank if the ranks' parts do not make up one batch.

    Args:
        notes: the note of each rank, which ``gather_if_different`` returned.
        sizes_may_differ: whether items of different sizes can be padded.

    Raises:
        RuntimeError, ValueError: the message lists what each rank has read.
    """
    kinds = {note.kind for note in notes}
    if "error" in kinds:
        failures = [(rank, note.error) for rank, note in enumerate(notes) if note.kind == "error"]
        lines = "\n".join(f"  rank {rank}: {error}" for rank, error in failures)
        raise RuntimeError(f"data.loader: not every rank could read its part of a batch.\n{lines}")
    if len(kinds) > 1:
        ended_ranks = [rank for rank, note in enumerate(notes) if note.kind == "end"]
        raise RuntimeError(
            f"data.loader: the data has ended on ranks {ended_ranks} and goes on on the others: "
            "they read different data sets.\n"
            "  Give every rank the same data set; which part a rank reads is the loader's choice. "
            "A stream that divides itself among ranks must give each rank all of it."
        )
    if len({(note.order, note.count) for note in notes}) > 1:
        raise RuntimeError(
            "data.loader: the ranks are about to read different batches:\n"
            + lines_by_rank([f"{note.count} items, checksum {note.order:#x}" for note in notes])
            + "\n  Their samplers draw another order on each rank. Seed every rank alike "
            "(torch.manual_seed), or give the DataLoader generator=torch.Generator()"
            ".manual_seed(0); and give each rank the same data set."
        )
    _check_fields(notes, sizes_may_differ)
    _check_values(notes)


def _check_values(notes: list[BatchNote]) -> None:
    firsts: dict[int, BatchNote] = {}
    for note in notes:
        if not note.values:
            continue
        first = firsts.setdefault(note.share, note)
        for index, (path, *_) in enumerate(note.fields):
            if first.values and note.values[index] != first.values[index]:
                raise RuntimeError(
                    f"data.loader: {name_of(path)} differs between ranks that read the same "
                    "items:\n"
                    + lines_by_rank(
                        [n.values[index] if n.values else "takes no part" for n in notes]
                    )
                    + "\n  The data set, or what is drawn while it is read, differs by rank, and "
                    "each would compute with other values. Make them equal: the same data set, and "
                    "random numbers seeded alike on every rank (torch.manual_seed, random.seed, "
                    "numpy.random.seed).\n"
                    "  Or let each rank read its own items: sbp=S(0), without whole=True.\n"
                    "  To take each rank's own values as they are: with "
                    "consistent.plain_may_differ()."
                )


def check_same_data(facts: tuple[str, ...]) -> None:
    """Raise on every rank if the ranks describe their data sets and batches differently.

    A collective of the world.

    Args:
        facts: this rank's description, from ``facts_of``: ("50000 items", "batches of 64").

    Raises:
        ValueError: the message lists the facts of each rank.
    """
    agree(
        facts,
        lambda every: ValueError(
            "data.loader: the ranks give other data:\n"
            + lines_by_rank(map(", ".join, every))
            + "\n  Each rank would read its part of other batches, or wait for one that does not "
            "come. Give every rank the same data set and batch size; which part a rank reads is "
            "the loader's choice. What is drawn to make the data set, as by random_split, is to be "
            "seeded alike: generator=torch.Generator().manual_seed(0)."
        ),
    )


def _check_fields(notes: list[BatchNote], sizes_may_differ: bool) -> None:
    first = notes[0].fields
    for note in notes[1:]:
        if [(f.path, f.kind, len(f.sizes)) for f in note.fields] != [
            (f.path, f.kind, len(f.sizes)) for f in first
        ]:
            raise RuntimeError(
                "data.loader: the parts of one batch do not have the same fields, dtypes and "
                "dims:\n"
                + lines_by_rank([_describe_fields(each) for each in notes])
                + "\n  The collate function runs on a rank's own items, and must give the same "
                f"structure for any of them; or let every rank collate the batch whole: {WHOLE}."
            )
    for index, (path, *_) in enumerate(first):
        fields = [note.fields[index] for note in notes]
        if len({repr(field.value) for field in fields}) > 1:
            raise RuntimeError(
                f"data.loader: {name_of(path)} is one value for the whole batch, and differs by "
                "rank:\n"
                + lines_by_rank([str(field.value) for field in fields])
                + "\n  The collate "
                "function makes it of a rank's own items. Let every rank collate the batch whole: "
                f"{WHOLE}."
            )
        if not sizes_may_differ and len({field.sizes for field in fields}) > 1:
            raise ValueError(
                f"data.loader: the parts of {name_of(path)} differ in more than their number of "
                "items:\n"
                + lines_by_rank([f"{list(field.sizes)} per item" for field in fields])
                + "\n  The collate function pads a rank's own items, and those of other ranks are "
                "longer; no tokenizer was found in it that says what it pads with. Say so, "
                'pad={"input_ids": 0, "labels": -100}; or let every rank collate the batch whole: '
                f"both pad= and {WHOLE}. Or pad to a fixed length."
            )


def _describe_fields(note: BatchNote) -> str:
    return ", ".join(f"{name_of(f.path)} {f.kind} {list(f.sizes)}" for f in note.fields)
