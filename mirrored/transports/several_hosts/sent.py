"""Computes the bytes that a collective sends between hosts, summed over all ranks.

Reports show these numbers. They follow what ``moves.py``, ``sums.py`` and, where each rank
is on a host of its own, ``torch_dist/transport.py`` send. ``host_of`` is the host of each rank of
the group, as in ``Hosts``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...comm import Link
from ...reduction import accumulation_dtype
from ..torch_dist.transport import in_one_round
from .hosts import positions_by_host
from .routes import plan_sum
from .sums import ONE_ROUND_BYTES, PIECE_BYTES

HostOfRank = tuple[int, ...]


def all_gather_bytes(host_of: HostOfRank, pieces: Sequence[int]) -> int:
    """Return the bytes that an all-gather sends between hosts, summed over all ranks.

    ``host_of`` is the host of each rank, ``pieces`` the bytes of each rank's piece.
    """
    return sum(pieces) * max(host_of)


def all_to_all_bytes(host_of: HostOfRank, pieces: Sequence[Sequence[int]]) -> int:
    """Return the bytes that an all-to-all sends between hosts, summed over all ranks.

    ``host_of`` is the host of each rank. Rank k sends ``pieces[k][j]`` bytes to rank j.
    """
    pairs = (
        (k, j) for k in range(len(host_of)) for j in range(len(host_of)) if host_of[k] != host_of[j]
    )
    return sum(pieces[k][j] for k, j in pairs)


def reduce_scatter_bytes(
    host_of: HostOfRank, parts: Sequence[int], dtype: torch.dtype, at_once: bool = False
) -> int:
    """Return the bytes that a reduce-scatter sends between hosts, summed over all ranks.

    ``host_of`` is the host of each rank, and rank k gets ``parts[k]`` bytes. ``at_once`` is True
    for a reduce-scatter that is started and overlaps with computation.
    """
    if not _has_shared_host(host_of):
        return sum(parts) * (len(host_of) - 1) if max(host_of) else 0
    return sum(
        nbytes * _addends_sent(host_of, k, dtype, at_once)
        for k, nbytes in enumerate(parts)
        if nbytes
    )


def all_reduce_bytes(host_of: HostOfRank, numel: int, dtype: torch.dtype, link: Link | None) -> int:
    """Return the bytes that an all-reduce of ``numel`` numbers sends between hosts, over all ranks.

    ``host_of`` is the host of each rank. ``link``, the measured cost of messages or None, decides
    between two algorithms.
    """
    nbytes, n, hosts = numel * dtype.itemsize, len(host_of), max(host_of) + 1
    if hosts == 1:
        return 0
    if not _has_shared_host(host_of):
        return nbytes * (n - 1) * (n if in_one_round(link, nbytes, n) else 2)
    if nbytes * (max(map(len, positions_by_host(host_of))) - 1) <= ONE_ROUND_BYTES:
        return nbytes * n * (hosts - 1)
    last_positions = positions_by_host(host_of)[host_of[-1]]
    sent_per_part = [_addends_sent(host_of, k, dtype, False) for k in last_positions]
    sums = sum(
        part * addends
        for piece in _even_sizes(numel, -(-nbytes // PIECE_BYTES))
        for part, addends in zip(
            _even_sizes(piece, len(last_positions)), sent_per_part, strict=True
        )
    )
    return sums * dtype.itemsize + nbytes * (hosts - 1)


def _has_shared_host(host_of: HostOfRank) -> bool:
    """Return whether there are several hosts, and several ranks on at least one of them."""
    return 1 < max(host_of) + 1 < len(host_of)


def _even_sizes(n: int, parts: int) -> list[int]:
    return [n // parts + (k < n % parts) for k in range(parts)]


def _addends_sent(host_of: HostOfRank, target: int, dtype: torch.dtype, at_once: bool) -> int:
    """Return how many bytes are sent between hosts to sum a part, as a multiple of its bytes.

    The rank at position ``target`` gets the sum. ``host_of`` and ``at_once`` are those of
    ``plan_sum``.
    """
    wide = accumulation_dtype(dtype).itemsize // dtype.itemsize
    stages = plan_sum(host_of, target, wide, at_once)
    count = sum(host_of[k] != host_of[stage.worker] for stage in stages for k in stage.adds)
    count += wide * sum(host_of[a.worker] != host_of[b.worker] for a, b in zip(stages, stages[1:]))
    return count + (host_of[stages[-1].worker] != host_of[target])
