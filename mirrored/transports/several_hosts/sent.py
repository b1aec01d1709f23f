"""Computes the bytes that a collective sends between hosts, summed over all ranks.

Reports show these numbers. They follow what ``moves.py``, ``sums.py`` and, where each rank
is on a host of its own, ``torch_dist/transport.py`` send. ``of`` is the host of each rank of the
group, as in ``Hosts``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...comm import Link
from ...reduction import accumulated_in
from ..torch_dist.transport import in_one_round
from .hosts import members
from .routes import route
from .sums import PIECE, SMALL

Of = tuple[int, ...]


def of_all_gather(of: Of, pieces: Sequence[int]) -> int:
    """Return the bytes that an all-gather sends between hosts, summed over all ranks.

    ``of`` is the host of each rank, ``pieces`` the bytes of each rank's piece.
    """
    return sum(pieces) * max(of)


def of_all_to_all(of: Of, pieces: Sequence[Sequence[int]]) -> int:
    """Return the bytes that an all-to-all sends between hosts, summed over all ranks.

    ``of`` is the host of each rank. Rank k sends ``pieces[k][j]`` bytes to rank j.
    """
    pairs = ((k, j) for k in range(len(of)) for j in range(len(of)) if of[k] != of[j])
    return sum(pieces[k][j] for k, j in pairs)


def of_reduce_scatter(
    of: Of, parts: Sequence[int], dtype: torch.dtype, at_once: bool = False
) -> int:
    """Return the bytes that a reduce-scatter sends between hosts, summed over all ranks.

    ``of`` is the host of each rank, and rank k gets ``parts[k]`` bytes. ``at_once`` is True for a
    reduce-scatter that is started and overlaps with computation.
    """
    if not _is_mixed(of):
        return sum(parts) * (len(of) - 1) if max(of) else 0
    return sum(nbytes * _addends(of, k, dtype, at_once) for k, nbytes in enumerate(parts) if nbytes)


def of_all_reduce(of: Of, numel: int, dtype: torch.dtype, link: Link | None) -> int:
    """Return the bytes that an all-reduce of ``numel`` numbers sends between hosts, over all ranks.

    ``of`` is the host of each rank. ``link``, the measured cost of messages or None, decides
    between two algorithms.
    """
    nbytes, n, hosts = numel * dtype.itemsize, len(of), max(of) + 1
    if hosts == 1:
        return 0
    if not _is_mixed(of):
        return nbytes * (n - 1) * (n if in_one_round(link, nbytes, n) else 2)
    if nbytes * (max(map(len, members(of))) - 1) <= SMALL:
        return nbytes * n * (hosts - 1)
    last = members(of)[of[-1]]
    cost = [_addends(of, k, dtype, False) for k in last]
    sums = sum(
        part * each
        for piece in _split(numel, -(-nbytes // PIECE))
        for part, each in zip(_split(piece, len(last)), cost, strict=True)
    )
    return sums * dtype.itemsize + nbytes * (hosts - 1)


def _is_mixed(of: Of) -> bool:
    """Return whether there are several hosts, and several ranks on at least one of them."""
    return 1 < max(of) + 1 < len(of)


def _split(n: int, parts: int) -> list[int]:
    return [n // parts + (k < n % parts) for k in range(parts)]


def _addends(of: Of, target: int, dtype: torch.dtype, at_once: bool) -> int:
    """Return how many bytes are sent between hosts to sum a part, as a multiple of its bytes.

    The rank at position ``target`` gets the sum. ``of`` and ``at_once`` are those of ``route``.
    """
    wide = accumulated_in(dtype).itemsize // dtype.itemsize
    stages = route(of, target, wide, at_once)
    sent = sum(of[k] != of[stage.worker] for stage in stages for k in stage.adds)
    sent += wide * sum(of[a.worker] != of[b.worker] for a, b in zip(stages, stages[1:]))
    return sent + (of[stages[-1].worker] != of[target])
