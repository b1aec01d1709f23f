"""Make sure that all ranks move the same job to the same place, or that no rank does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import gather_from_ranks

from ...forms.random import generator
from ...movement.check_mode import digest
from ...spec import Placement
from .carry import PendingMove
from .job import JobToMove

_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (TypeError, ValueError, RuntimeError)
}


class _Note(NamedTuple):
    """What a rank reports to the others about its planned move, before anything moves."""

    error: tuple[str, str] | None  # class and message of the rank's error
    move_hash: str  # a hash of the move that the rank has planned
    plain: dict[str, str]  # a hash of each plain tensor, which the rank holds whole
    seed: int  # seed of the random numbers of global tensors
    count: int  # number of draws from that seed so far


def agree_on_move(prepare: Callable[[], PendingMove]) -> tuple[PendingMove, list[str]]:
    """Run ``prepare``, and return its result if it succeeded, with the same plan, on every rank.

    Takes at most two small collectives. ``move`` calls it before anything is sent.

    Returns:
        the result of ``prepare``, and the names of plain tensors that have other values on ranks
        that join the job.

    Raises:
        TypeError, ValueError, RuntimeError: on every rank, if ``prepare`` raises on any, or the
            ranks' jobs differ.
    """
    pending, own_error = None, None
    try:
        pending = prepare()
    except Exception as error:  # sent to the other ranks, and raised below
        own_error = error
    try:
        notes: list[_Note] = gather_from_ranks(_note(pending, own_error))
        if own_error is not None:
            raise own_error
    finally:
        # Breaks the cycle of error and frame, which would keep the job's tensors alive.
        del own_error
    _raise_error_of_other_rank(notes)
    assert pending is not None
    job = pending.job
    if len({note.move_hash for note in notes}) > 1:
        _raise_difference(gather_from_ranks(_move_lines(job)))
    _check_seeds(notes, job.old, job.placement)
    return pending, _plain_differences(notes, job)


def _note(pending: PendingMove | None, error: Exception | None) -> _Note:
    """Return this rank's note for the others: its error, or hashes of what it would move."""
    if pending is None:
        return _Note((type(error).__name__, str(error)), "", {}, 0, 0)
    job = pending.job
    joining_ranks = set(job.placement.ranks.ravel().tolist()) - set(job.old.ranks.ravel().tolist())
    # A hash keeps the message small; the lines themselves are gathered only if hashes differ.
    move_hash = hashlib.blake2b("\n".join(_move_lines(job)).encode(), digest_size=16).hexdigest()
    plain = {name: digest(x) for name, x in job.plain.items()} if joining_ranks else {}
    return _Note(None, move_hash, plain, *generator.get_state())


def _move_lines(job: JobToMove) -> list[str]:
    """Return the move that this rank has planned as lines of text, to be compared between ranks.

    One line for each tensor, layout of the plan, and parameter group: ``fc.weight: ... -> ...``.
    """
    lines = [f"from {job.old} to {job.placement}, inputs {job.inputs}"]
    lines += map(str, job.tensors())
    for name, border in job.plan.modules.items():
        lines.append(f"border of {name}: {border}")
    for name, layouts in job.plan.tensors.items():
        lines.append(f"plan of {name}: {layouts}")
    for optimizer in job.optimizers:
        for k, group in enumerate(optimizer.param_groups):
            options = {key: x for key, x in group.items() if _is_plain_option(key, x)}
            lines.append(f"{type(optimizer).__name__} group {k}: {options}")
    return lines


def _is_plain_option(key: str, value: Any) -> bool:
    """Return whether an entry of a parameter group can be compared between ranks as text."""
    kinds = (int, float, str, tuple, type(None))
    return key != "params" and isinstance(value, kinds) and not isinstance(value, torch.Tensor)


def _raise_error_of_other_rank(notes: list[_Note]) -> None:
    """Raise the first error that another rank has reported, with that rank's number."""
    for rank, note in enumerate(notes):
        if note.error is not None:
            name, words = note.error
            text = f"move: rank {rank} raises {name}, and so nothing is moved.\n  {words}"
            raise _ERRORS.get(name, RuntimeError)(text)


def _raise_difference(rank_lines: list[list[str]]) -> None:
    """Raise with the first lines in which two ranks' plans differ.

    Raises:
        ValueError: always, since their hashes differ.
    """
    for rank, lines in enumerate(rank_lines):
        if lines != rank_lines[0]:
            line_of_0 = next((x for x in rank_lines[0] if x not in lines), "fewer tensors")
            line_of_rank = next((x for x in lines if x not in rank_lines[0]), "fewer tensors")
            raise ValueError(
                f"move: the ranks are about to do different things.\n  rank 0 says {line_of_0}\n  "
                f"rank {rank} says {line_of_rank}\n  Give the same placement and plan on every "
                "rank of the world, those outside the placements too, and let all of them run the "
                "same steps before. Nothing is moved."
            )


def _check_seeds(notes: list[_Note], old: Placement, new: Placement) -> None:
    """Raise if a rank of the new placement has another random state than the job.

    Args:
        notes: the note of each rank, with its seed and the number of random draws.
        old, new: the placement before and after the move. The state of the first rank of ``old`` is
            that of the job.

    Raises:
        RuntimeError: the job's random numbers would be others on that rank.
    """
    first = notes[old.first_rank]
    for rank in new.ranks.ravel().tolist():
        note = notes[rank]
        if first.count or note.count:
            if (note.seed, note.count) != (first.seed, first.count):
                raise RuntimeError(
                    f"move: rank {old.first_rank} has drawn {first.count} times from seed "
                    f"{first.seed}, and rank {rank}, which the job moves to, {note.count} times "
                    f"from seed {note.seed}. Its random numbers would be others. Call "
                    "torch.manual_seed with the same seed on every rank, and let ranks outside "
                    "the placement run the same program. Nothing is moved."
                )


def _plain_differences(notes: list[_Note], job: JobToMove) -> list[str]:
    """Return the names of plain tensors whose values ranks that join the job do not have.

    They are compared with those of the old placement's first rank, which will send them.

    Raises:
        ValueError: a plain tensor differs in more than its values.
    """
    sender_tensors = notes[job.old.first_rank].plain
    old = set(job.old.ranks.ravel().tolist())
    differing_names: dict[str, None] = {}
    for rank in job.placement.ranks.ravel().tolist():
        if rank in old:
            continue
        rank_tensors = notes[rank].plain
        for name in dict.fromkeys([*sender_tensors, *rank_tensors]):
            if sender_tensors.get(name) != rank_tensors.get(name):
                kinds = [
                    each.get(name, "none").rpartition(" ")[0]
                    for each in (sender_tensors, rank_tensors)
                ]
                if kinds[0] != kinds[1]:
                    raise ValueError(
                        f"move: {name} is a plain tensor, {sender_tensors.get(name, 'none')} on "
                        f"rank {job.old.first_rank} and {rank_tensors.get(name, 'none')} on rank "
                        f"{rank}, which the job moves to. Let ranks outside the placement run the "
                        "same program. Nothing is moved."
                    )
                differing_names[name] = None
    return list(differing_names)
