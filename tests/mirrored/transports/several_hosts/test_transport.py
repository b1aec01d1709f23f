"""Moves of ranks on several hosts: the bits of simulated ranks, and the fewest bytes between
hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mirrored import current
from mirrored.transports.in_process import run_ranks
from mirrored.transports.several_hosts.sums import ONE_ROUND_BYTES, PIECE_BYTES
from mirrored.transports.torch_dist import messages
from tests.mirrored.transports.moves import DTYPES, all_moves, bits
from tests.mirrored.transports.several_hosts.kinds import on_hosts
from tests.mirrored.transports.test_dtypes import NAMES, outcomes
from tests.ranks import ALL, simulate

HOSTS = ["aabb", "aaab", "abab", "abb", "abbb", "aab", "aba"] if ALL else ["aabb", "aaab", "aba"]
on_each = pytest.mark.parametrize("hosts", HOSTS)
LONG = [300, 60]  # sums of it go from host to host, in several pieces
SHAPES = [([3, 5], False), ([4, 0], False), ([70, 9], True), (LONG, False)]


def every_dtype(rank: int, n: int, shape: list[int], turned: bool) -> list[Tensor]:
    """Of long tensors those whose sums are unlike in how they are made and cut."""
    few = (torch.float64, torch.bfloat16, torch.int16, torch.complex64)
    dtypes = few if shape == LONG and not ALL else DTYPES
    return [x for dtype in dtypes for x in all_moves(rank, n, shape, dtype, turned, odd=True)]


@on_each
@pytest.mark.parametrize("shape, turned", SHAPES)
def test_every_move_gives_the_bits_of_simulated_ranks(
    hosts: str, shape: list[int], turned: bool
) -> None:
    wanted = simulate(every_dtype, len(hosts), len(hosts), shape, turned)
    got = on_hosts(hosts, every_dtype, len(hosts), shape, turned)
    for a, b in zip(sum(got, []), sum(wanted, []), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


@pytest.mark.parametrize("hosts", HOSTS if ALL else HOSTS[:1])
def test_every_dtype_moves_or_gives_the_same_error(hosts: str) -> None:
    n = len(hosts)
    wanted, got = simulate(outcomes, n, n, NAMES), on_hosts(hosts, outcomes, n, NAMES)
    for own, found in zip(wanted, got, strict=True):
        assert own.keys() == found.keys()
        for call, result in own.items():
            if isinstance(result, list):
                assert found[call] == result, call


# ---- what goes between hosts --------------------------------------------------------------------

N = 4 * ONE_ROUND_BYTES  # bytes of a tensor whose sum goes from host to host
Move = Callable[[tuple[int, ...], Tensor], object]
MOVES: dict[str, Move] = {
    "all_gather_into_tensor": lambda r, x: current().all_gather_into_tensor(
        x[: len(x) // len(r)], 0, _cut(r, x), r
    ),
    "peers": lambda r, x: current().peers(x, r).__enter__(),
    "all_reduce": lambda r, x: current().all_reduce(x, r),
    "small all_reduce": lambda r, x: current().all_reduce(x[: len(x) // 8], r),
    "reduce_scatter": lambda r, x: current().reduce_scatter(x, 0, _cut(r, x), r),
    "several scattered": lambda r, x: current().reduce_scatter_several(
        [x[: len(x) // 2], x[: len(x) // 2]], [0, 0], [_cut(r, x[: len(x) // 2])] * 2, r
    ),
    "all_to_all_single": lambda r, x: current().all_to_all_single(
        x[: len(x) // len(r)], 1, [1] * len(r), 0, _cut(r, x), r
    ),
    "broadcast": lambda r, x: current().broadcast(x, x.shape, x.dtype, "cpu", r[-1], r),
    "exchange": lambda r, x: current().exchange(
        [(k, x) for k in r], [(k, x.shape, x.dtype) for k in r], r
    ),
}


def _cut(ranks: tuple[int, ...], x: Tensor) -> list[int]:
    return [len(x) // len(ranks)] * len(ranks)


def sent(rank: int, n: int) -> dict[str, list[tuple[int, int]]]:
    """(to, bytes) of the messages that each move sends."""
    ranks, found = tuple(range(n)), {}
    x = torch.ones(N // 4 // n, n)
    for name, move in MOVES.items():
        move(ranks, x)  # the first call makes segments
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages.StartedMessages, "__init__", _noting(noted := []))
            move(ranks, x)
        found[name] = noted
    return found


def _noting(noted: list[tuple[int, int]]) -> Any:
    real = messages.StartedMessages.__init__

    def init(self: Any, name: str, x: Tensor, sends: Any, out: Any, ranks: Any) -> None:
        noted.extend((to, y.nbytes) for to, y in sends)
        real(self, name, x, sends, out, ranks)

    return init


# In bytes of the whole tensor; in brackets what messages alone send.
BETWEEN = {
    "aabb": {
        "all_gather_into_tensor": 1,  # (2)
        "peers": 4,  # (8)
        "all_reduce": 2,  # (4)
        "small all_reduce": 4 / 8,
        "reduce_scatter": 1.5,  # (2)
        "several scattered": 1.5,
        "all_to_all_single": 0.5,
        "broadcast": 1,
        "exchange": 8,
    },
    "aaab": {
        "all_gather_into_tensor": 1,  # (1.5)
        "peers": 4,  # (6)
        "all_reduce": 2,  # (3)
        "small all_reduce": 4 / 8,
        "reduce_scatter": 1,  # (1.5)
        "several scattered": 1,
        "all_to_all_single": 6 / 16,
        "broadcast": 1,
        "exchange": 6,
    },
}


@pytest.mark.parametrize("hosts", BETWEEN)
def test_little_goes_between_hosts_and_nothing_by_messages_inside_one(hosts: str) -> None:
    found = on_hosts(hosts, sent, len(hosts))
    for name, share in BETWEEN[hosts].items():
        inside = [m for rank in range(4) for m in found[rank][name] if hosts[m[0]] == hosts[rank]]
        assert not inside, name
        assert sum(size for own in found for _, size in own[name]) == share * N, name
        most = max(len(own[name]) for own in found)
        assert most <= 3, f"{name}: {most} messages of a rank"


# ---- several under way --------------------------------------------------------------------------


def under_way(rank: int, n: int) -> list[Tensor]:
    """Sums of several lengths and dtypes, gathers and scatters, that all fly at once."""
    ranks, t, g = tuple(range(n)), current(), torch.Generator().manual_seed(rank)
    sizes = [3, ONE_ROUND_BYTES // 4 + 1, PIECE_BYTES // 2 + 5, PIECE_BYTES, 7]
    xs = [torch.randn(size, generator=g) for size in sizes]
    xs += [x.to(dtype) for x in xs[1:3] for dtype in (torch.bfloat16, torch.float64)]
    sums = [t.all_reduce_async(x.clone(), ranks) for x in xs]
    rows = [k + 1 for k in range(n)]
    parts = [torch.randn(rows[rank], 2_000 * k, generator=g) for k in range(3)]
    whole = [torch.randn(sum(rows), 2_000 * k + 1, generator=g) for k in range(3)]
    joins = [t.start_all_gather_several(parts, [0] * 3, [rows] * 3, ranks) for _ in range(2)]
    cuts = [t.start_reduce_scatter_several(whole, [0] * 3, [rows] * 3, ranks) for _ in range(2)]
    sums.append(t.all_reduce_async(xs[2] * 2, ranks))
    found = [x for each in (*joins, *cuts) for x in each.wait()]
    return found + [each.wait() for each in sums]


@on_each
def test_several_moves_are_under_way_at_once(hosts: str) -> None:
    n = len(hosts)
    wanted = run_ranks(lambda rank: under_way(rank, n), n)
    for own, found in zip(wanted, on_hosts(hosts, under_way, n), strict=True):
        for a, b in zip(own, found, strict=True):
            assert bits(a) == bits(b)


def waits_alone(rank: int, n: int) -> list[Tensor]:
    """Each rank waits for what was started at another place of the program."""
    ranks, g = tuple(range(n)), torch.Generator().manual_seed(rank)
    whole = torch.randn(n, 5_000, generator=g)
    started = current().start_reduce_scatter_several([whole], [0], [[1] * n], ranks)
    found = []
    for turn in range(n):
        if turn == rank:
            found = started.wait()
        current().gather_objects(turn, ranks)
    return found


@on_each
def test_what_was_started_needs_no_other_rank_to_be_waited_for(hosts: str) -> None:
    n = len(hosts)
    wanted = run_ranks(lambda rank: waits_alone(rank, n), n)
    for own, found in zip(wanted, on_hosts(hosts, waits_alone, n), strict=True):
        assert bits(own[0]) == bits(found[0])


# ---- groups ------------------------------------------------------------------------------------


def of_groups(rank: int) -> list[bool]:
    """Whether memory is shared by all ranks, by those of one host, and by those of two."""
    groups = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (1, 0, 3)]
    mine = [ranks for ranks in groups if rank in ranks]
    sums = [current().all_reduce(torch.ones(3), ranks)[0].item() for ranks in mine]
    assert sums == list(map(len, mine))
    return [current().shares(ranks, "cpu") for ranks in mine]


def test_a_group_on_one_host_shares_memory_though_the_world_does_not() -> None:
    found = on_hosts("aabb", of_groups)
    assert found[0] == [False, True, False, False] and found[2] == [False, True, False]
