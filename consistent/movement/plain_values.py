"""Comparison between ranks of plain tensors that are used together with global ones.

Such plain tensors count as B (replicated), so they must be equal on all ranks. Ranks compare them,
by a hash, the first times that an op uses a plain tensor of some kind.

Every rank must compare at the same calls, but each rank drops cached plans at its own time. So a
counter that is never decreased decides: how often an op, by its name, was planned for operands of
these layouts, and these dtypes and numbers of dims of plain tensors. There are as many counters as
a program has ops and layouts. Sizes and values add none, so their number is bounded by the program
and not by how long it runs.

The source of each rank's random numbers is compared in the same way (``forms/random/draw.py``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from mirrored.every_rank import agree, lines_by_rank
from mirrored.transports import default
from mirrored.transports.base.unseen import hidden_from_modes

from ..spec import Placement
from .check_mode import call_site, digest
from .world import my_coordinate

# Times that each kind is compared. More than one, since a program may use several tensors of one
# kind, such as token and position ids that both select rows of an embedding: the first of them may
# be equal on all ranks and another one not.
CHECKED_CALLS = 4

_is_enabled = os.environ.get("CONSISTENT_COMPARE_PLAIN", "1") not in ("", "0")
# (rank, size of its world) -> (placement, kind) -> number of comparisons. By rank, because
# simulated ranks share this module with each other and with the process that simulates them.
_comparison_counts: dict[tuple[int, int], dict[tuple, int]] = {}


class _ThreadState(threading.local):
    off_depth: int = 0


_thread = _ThreadState()


@contextmanager
def plain_may_differ() -> Iterator[None]:
    """Allow plain tensors that differ between ranks to be used with global ones in the context.

    Each rank then takes its own value as the whole one, and no comparison is made; neither are the
    seeds of random global tensors compared. Enter the context on all ranks at the same point of the
    program. ``CONSISTENT_COMPARE_PLAIN=0`` in the environment does the same for the whole program.
    """
    _thread.off_depth += 1
    try:
        yield
    finally:
        _thread.off_depth -= 1


def compare_plain(
    what: str, tensors: Sequence[Tensor], placement: Placement, kind: Hashable
) -> bool:
    """Compare plain tensors between ranks, at the first ``CHECKED_CALLS`` calls with this ``kind``.

    It is called when an op combines ``tensors`` with global tensors, and takes one small
    collective.

    Args:
        what: name of the op, for the error.
        tensors: the plain tensors that the op uses.
        placement: the placement of the global tensors among its operands; its ranks compare.
        kind: calls with equal kinds, such as the same op on the same layouts, are counted together.

    Returns:
        Whether a later call with this kind is to be compared as well; the same on all ranks of the
            placement.

    Raises:
        RuntimeError: the tensors differ between ranks.
    """
    return bool(tensors) and check_first_times(
        placement, kind, lambda: _check_equal(what, tensors, placement)
    )


def check_first_times(placement: Placement, kind: Hashable, check: Callable[[], None]) -> bool:
    """Call ``check``, a collective of ``placement``, ``CHECKED_CALLS`` times for each ``kind``.

    Args:
        placement: the ranks that check; a single rank never does.
        kind: calls with equal kinds are counted together.
        check: raises if ranks differ. It is not called inside ``plain_may_differ``.

    Returns:
        Whether a later call will call it again; the same on all ranks of the placement.
    """
    if placement.size == 1 or not _is_enabled or my_coordinate(placement) is None:
        return False
    transport = default.current()
    counts, key = (
        _comparison_counts.setdefault((transport.rank, transport.size), {}),
        (placement, kind),
    )
    times = counts.get(key, 0)
    if times >= CHECKED_CALLS:
        return False
    if not _thread.off_depth:
        # Not recorded: a compiled step compares only while it is recorded.
        with hidden_from_modes():
            check()
    counts[key] = times + 1
    return times + 1 < CHECKED_CALLS


def are_compared() -> bool:
    """Return whether this thread compares plain tensors between ranks.

    False inside ``plain_may_differ``, or if the environment has ``CONSISTENT_COMPARE_PLAIN=0``.
    """
    return _is_enabled and not _thread.off_depth


def reset_counts() -> None:
    """Reset all counts, so that all is compared again, as for a new process group."""
    _comparison_counts.clear()


def _check_equal(what: str, tensors: Sequence[Tensor], placement: Placement) -> None:
    ranks = tuple(placement.ranks.ravel().tolist())

    def difference_error(notes: list[list[str]]) -> RuntimeError:
        index = next(i for i in range(len(tensors)) if any(n[i] != notes[0][i] for n in notes))
        return RuntimeError(
            f"{what}: a plain tensor meets a global one and is taken as the whole value, but the "
            f"ranks have different ones.\n  at {call_site()}:\n"
            + lines_by_rank([note[index] for note in notes], ranks)
            + "\n  If each rank has its part: parallelize(..., inputs=S(0)) for what a module is "
            "given, or from_local(x, placement, S(0)).\n  If each should have the whole: make it "
            "equal (same seed, same data), or distribute(x, placement, sbp).\n"
            "  To take each rank's own value as it is: with consistent.plain_may_differ()."
        )

    agree([digest(x) for x in tensors], difference_error, ranks=ranks)
