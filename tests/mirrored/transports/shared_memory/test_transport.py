"""The moves in shared memory, against simulated ranks; and what happens when something is wrong."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mirrored
from mirrored import current, use
from mirrored.transports import _C
from mirrored.transports.shared_memory import SharedMemory, segments
from mirrored.transports.torch_dist import TorchDist
from mirrored.transports.tuning import measure, table
from mirrored.transports.tuning.table import Table
from tests.mirrored.transports.moves import DTYPES, all_moves, bits, numbers
from tests.ranks import RankError, pool, simulate

_transports: dict[int, SharedMemory] = {}  # one a process and slot size, for it holds segments


def in_small_slots(rank: int, fn: Any, *args: Any) -> Any:
    """`fn(rank, *args)` with slots of 1.5 KB, so that small tensors take several rounds."""
    if not _transports:
        _transports[0] = SharedMemory(TorchDist(), 1536)
    with use(_transports[0]):
        return fn(rank, *args)


@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from([2, 3, 4]),
    shape=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    scale=st.sampled_from([1, 1, 7, 40]),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
    odd=st.booleans(),
)
def test_every_move_gives_the_bits_of_simulated_ranks(
    n: int, shape: list[int], scale: int, dtype: torch.dtype, turned: bool, odd: bool
) -> None:
    shape = [shape[0] * scale, *shape[1:]]
    wanted = simulate(all_moves, n, n, shape, dtype, turned, odd)
    got = pool(n).run(in_small_slots, all_moves, n, shape, dtype, turned, odd)
    for rank in range(n):
        for k, (a, b) in enumerate(zip(got[rank], wanted[rank], strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b), (
                rank,
                k,
            )


def large(rank: int) -> list[bool]:
    """Longer than a slot of the usual size; 2 MB pages in the result."""
    x = numbers(rank, [1301, 1201], torch.float32, odd=False)
    parts = [numbers(k, [1301, 1201], torch.float32, odd=False) for k in range(3)]
    total = parts[0] + parts[1] + parts[2]
    cut, ranks = [301, 0, 1000], (0, 1, 2)
    with current().peers(x, ranks) as views:
        seen = [torch.equal(a, b) for a, b in zip(views, parts)]
    return [
        *seen,
        torch.equal(mirrored.all_reduce(x, ranks), total),
        torch.equal(mirrored.reduce_scatter(x, 0, cut, ranks), total.split(cut)[rank]),
        torch.equal(mirrored.all_gather(parts[0].split(cut)[rank], 0, cut, ranks), parts[0]),
        torch.equal(mirrored.broadcast(x, x.shape, x.dtype, "cpu", 1, ranks), parts[1]),
        len(current().gather_objects("x" * 2_000_000, ranks)[2]) == 2_000_000,
    ]


def test_messages_longer_than_a_slot() -> None:
    assert all(map(all, pool(3).run(large)))


def floats(rank: int) -> list[Tensor]:
    x = numbers(rank, [70_001], torch.float32, odd=False)
    return [mirrored.all_reduce(x, (2, 0, 1)) for _ in range(2)]


def test_all_reduce_gives_the_same_bits_on_every_rank_and_in_every_run() -> None:
    one = pool(3).run(floats)
    assert len({bits(x) for runs in [*one, *pool(3).run(floats)] for x in runs}) == 1


def alone(rank: int) -> list[Any]:
    t, x = SharedMemory(TorchDist()), torch.arange(3.0)
    with t.peers(x, (0,)) as views:
        seen = views[0].tolist()
    return [
        t.all_reduce(x, (0,)).tolist(),
        t.all_gather_into_tensor(x, 0, [3], (0,)).tolist(),
        seen,
        t._groups,
    ]


def test_one_rank_needs_no_segment() -> None:
    assert pool(1).run(alone) == [[[0, 1, 2]] * 3 + [{}]]


# ---- calls that do not fit ----------------------------------------------------------------------


def odd_one_out(rank: int, how: str) -> str:
    ranks, x = (0, 1, 2), torch.ones(4, 2)
    try:
        match how, rank:
            case "shape", 1:
                mirrored.all_reduce(x[:3], ranks)
            case "dtype", 1:
                mirrored.all_reduce(x.double(), ranks)
            case "op", 1:
                mirrored.all_reduce(x, ranks, "max")
            case "call", 1:
                mirrored.all_gather(x, 0, [4, 4, 4], ranks)
            case "piece", _:
                mirrored.all_gather(x[: 3 if rank == 1 else 4], 0, [4, 4, 4], ranks)
            case "sizes", _:
                mirrored.reduce_scatter(x, 0, [1, 2, 1] if rank == 1 else [2, 1, 1], ranks)
            case "cut", _:
                mirrored.reduce_scatter(x[: 3 if rank == 1 else 4], 0, [2, 1, 1], ranks)
            case "source", _:
                mirrored.broadcast(x, x.shape, x.dtype, "cpu", int(rank == 1), ranks)
            case "message", _:
                receives = [((rank - 1) % 3, (3,) if rank == 2 else (4, 2), x.dtype)]
                current().exchange([((rank + 1) % 3, x)], receives, ranks)
            case _:
                mirrored.all_reduce(x, ranks)
        return "nothing was said"
    except RuntimeError as error:
        assert mirrored.all_reduce(x, ranks).sum() == 24, "the next call works"
        return str(error)


SAID = {
    "shape": "rank 0 calls all_reduce(sum) of float32[4, 2] while rank 1 calls all_reduce(sum) of "
    "float32[3, 2]",
    "dtype": "rank 1 calls all_reduce(sum) of float64[4, 2]",
    "op": "rank 1 calls all_reduce(max) of float32[4, 2]",
    "call": "rank 1 calls all_gather of float32[4, 2] along dim 0",
    "piece": "rank 1 sends 24 bytes to rank 0 in all_gather of float32[3, 2] along dim 0, and "
    "rank 0 expects 32 in all_gather of float32[4, 2] along dim 0",
    "sizes": "rank 0 sends 8 bytes to rank 1 in reduce_scatter(sum) of float32[4, 2] along dim 0, "
    "and rank 1 expects 16",
    "cut": "rank 1 calls reduce_scatter(sum) of float32[3, 2] along dim 0",
    "source": "rank 1 calls broadcast of float32[4, 2] from rank 1",
    "message": "rank 1 sends 32 bytes to rank 2 in exchange, and rank 2 expects 12",
}


@pytest.mark.parametrize("how", SAID)
def test_every_rank_names_the_two_calls_that_do_not_fit(how: str) -> None:
    said = pool(3).run(odd_one_out, how)
    assert len(set(said)) == 1 and SAID[how] in said[0]


def wrong_everywhere(rank: int) -> None:
    mirrored.reduce_scatter(torch.ones(4), 0, [1, 1], (0, 1))


def test_sizes_that_are_wrong_on_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 2, not to that of the dim"):
        pool(2).run(wrong_everywhere)


def inside_peers(rank: int) -> str:
    x = torch.ones(2)
    with current().peers(x, (0, 1)):
        try:
            mirrored.all_reduce(x, (0, 1))
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_call_while_peers_are_open_is_refused() -> None:
    assert all("after the `with` block" in said for said in pool(2).run(inside_peers))


# ---- ranks that end, or do not come -------------------------------------------------------------


def survive(rank: int) -> str:
    mirrored.all_reduce(torch.ones(1), (0, 1, 2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for _ in range(2):  # a broken group stays broken
        try:
            mirrored.all_reduce(torch.ones(1), (0, 1, 2))
        except RuntimeError as error:
            said.append(str(error))
    assert len(said) == 2 and said[0] == said[1]
    return said[0]


def test_a_rank_that_is_killed_makes_the_others_raise_and_leaves_nothing() -> None:
    pool(3).run(alone_in_group)
    pids = [process.pid for process in pool(3)._processes]
    with pytest.raises(RankError) as raised:
        pool(3).run(survive)
    text = str(raised.value)
    assert "died, exit code -9" in text
    assert text.count("rank 1 (process") == 2 and text.count("has ended while rank") == 2
    assert not [name for pid in pids for name in glob.glob(f"/dev/shm/consistent-*-{pid}-*")]


def interrupted(rank: int, lacking: int) -> list[str]:
    """Which segments this process has named when its exchange about one is cut short."""
    inner = current().inner  # type: ignore[attr-defined]
    exchange, calls = type(inner).gather_objects, iter(range(9))

    def gather_objects(self: Any, note: Any, ranks: Any) -> Any:
        if next(calls) == lacking:
            raise RuntimeError("a rank has ended")
        return exchange(self, note, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(inner), "gather_objects", gather_objects)
        with pytest.raises(RuntimeError, match="has ended") as raised:
            segments.make_segment(inner, (0, 1), 1 << 12, inner.timeout_s())
    names = glob.glob(f"/dev/shm/consistent-*-{os.getpid()}-*")
    assert raised.value.__traceback__ is not None  # it keeps the frame of ``make`` until here
    return names


@pytest.mark.parametrize("lacking", [0, 1])
def test_an_exchange_that_is_cut_short_leaves_no_name(lacking: int) -> None:
    assert pool(2).run(interrupted, lacking) == [[], []]


def alone_in_group(rank: int) -> None:
    mirrored.all_reduce(torch.ones(1), (0, 1, 2))


class Hurried(TorchDist):
    """A transport whose ranks wait half a second."""

    def timeout_s(self) -> float:
        return 0.5


def late(rank: int) -> str:
    t, x = SharedMemory(Hurried()), torch.ones(1)
    t.all_reduce(x, (0, 1))
    try:
        if rank == 1:
            current().gather_objects(0, (0, 1))
        t.all_reduce(x, (0, 1))
        return "it came"
    except RuntimeError as error:
        return str(error)


def test_a_rank_that_does_not_come_is_named() -> None:
    said = pool(2).run(late)
    pool(2).close()
    assert "has waited 0.5 s for rank 1 in all_reduce(sum) of float32[1]" in said[0]
    assert said[0] == said[1]  # also where it waits in another group


ABANDONED = """
import os, signal
from mirrored.transports import _C
print(_C.Group(None, 0, (0, 1), 4096, 1.0).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_what_a_killed_process_left() -> None:
    ours = _C.Group(None, 0, (0, 1), 4096, 1.0)
    ended = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True)
    left = "/dev/shm" + ended.stdout.strip()
    assert ended.returncode == -9 and "consistent" in left
    _C.remove_abandoned()
    assert not os.path.exists(left)
    assert os.path.exists("/dev/shm" + ours.name)  # its creator lives
    path = "/dev/shm" + ours.name
    del ours
    assert not os.path.exists(path)


# ---- where memory is not shared -----------------------------------------------------------------


def fallen_back(rank: int, why: str, where: int) -> tuple[bool, float, list[str]]:
    def fail(*_: Any) -> None:
        raise RuntimeError("no space left")

    patch = pytest.MonkeyPatch()
    if rank == where:
        match why:
            case "off":
                patch.setenv(segments.SWITCH, "0")
            case "another host":
                patch.setattr(segments, "_C", _Elsewhere)
            case "no room":
                patch.setattr(segments, "_try_make_group", lambda *_: (None, "no space left"))
    with patch.context(), warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        t = SharedMemory(TorchDist())
        total = t.all_reduce(torch.full((2,), float(rank)), (0, 1, 2))[0].item()
        t.all_reduce(torch.ones(1), (0, 1, 2))
        patch.undo()
    return t._groups[0, 1, 2] is None, total, [str(w.message) for w in met]


class _Elsewhere:
    @staticmethod
    def host_identity() -> str:
        return "another host"

    Group = _C.Group
    remove_abandoned = _C.remove_abandoned


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("why", ["off", "another host", "no room"])
def test_all_ranks_send_messages_where_one_cannot_share_memory(why: str, where: int) -> None:
    for without, total, said in pool(3).run(fallen_back, why, where):
        assert without and total == 3
        assert len(said) == (why == "no room")
        assert all("cannot share memory: no space left" in text for text in said)


def no_room_to_grow(rank: int) -> list[Any]:
    patch, x = pytest.MonkeyPatch(), torch.full((100_000,), float(rank))
    t = SharedMemory(TorchDist(), 4096)
    with warnings.catch_warnings(record=True) as met:
        if rank == 1:
            patch.setattr(segments, "_try_grow", lambda *_: (None, "no space left"))
        with t.peers(x, (0, 1)) as views:
            copies = [view[0].item() for view in views]
        patch.undo()
        with t.peers(x, (0, 1)) as views:
            shared = [view[0].item() for view in views]
    return [copies, shared, len(met)]


def test_peers_are_gathered_where_a_segment_cannot_grow() -> None:
    assert pool(2).run(no_room_to_grow) == [[[0, 1], [0, 1], 1]] * 2


# ---- which way a move goes ----------------------------------------------------------------------


class Watched(TorchDist):
    """Notes the moves that come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[str] = []

    def all_reduce(self, *args: Any) -> Tensor:
        self.moves.append("all_reduce")
        return super().all_reduce(*args)

    def all_gather_into_tensor(self, *args: Any) -> Tensor:
        self.moves.append("all_gather_into_tensor")
        return super().all_gather_into_tensor(*args)


def chosen(rank: int, folder: str) -> tuple[list[str], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/{rank}")
        if rank == 0:
            table.save(Table(messages_above={"all_reduce": 8}), 3, table.cpu_device_name())
        inner, ranks, sums = Watched(), (0, 1, 2), []
        t = SharedMemory(inner)
        for n in (2, 3):
            x = torch.ones(n)
            sums.append(
                int(
                    t.all_reduce(x, ranks).sum()
                    + t.all_gather_into_tensor(x, 0, [n] * 3, ranks).sum()
                )
            )
    return inner.moves, sums


def test_all_ranks_go_by_the_table_of_the_first(tmp_path: Path) -> None:
    assert pool(3).run(chosen, str(tmp_path)) == [(["all_reduce"], [12, 18])] * 3


def across_a_border(rank: int, folder: str, move: str) -> str:
    """What messages move on rank 1 is short enough for shared memory on rank 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/{rank}")
        table.save(Table(messages_above=dict.fromkeys(table.MOVES, 64)), 2, table.cpu_device_name())
        t, ranks, n = SharedMemory(TorchDist()), (0, 1), (2, 200)[rank]
        x = torch.ones(n, 2)
        moves = {
            "all_reduce": lambda: t.all_reduce(x, ranks),
            "all_reduce_async": lambda: t.all_reduce_async(x, ranks),
            "reduce_scatter": lambda: t.reduce_scatter(x, 0, [n, 0], ranks),
            "all_gather_into_tensor": lambda: t.all_gather_into_tensor(x, 0, [n, n], ranks),
            "all_to_all_single": lambda: t.all_to_all_single(x, 1, [1, 1], 0, [n, n], ranks),
            "broadcast": lambda: t.broadcast(x, x.shape, x.dtype, "cpu", 0, ranks),
        }
        try:
            moves[move]()
            return "nothing was said"
        except RuntimeError as error:
            assert t.all_reduce(torch.ones(60), ranks).sum() == 120, "the next call works"
            return str(error)


@pytest.mark.parametrize("move", ["all_reduce_async", *table.MOVES])
def test_calls_that_do_not_fit_are_named_where_only_one_goes_by_messages(
    move: str, tmp_path: Path
) -> None:
    said = pool(2).run(across_a_border, str(tmp_path), move)
    assert len(set(said)) == 1 and "rank 0 " in said[0] and "float32[200, 2]" in said[0]


def tuned(rank: int, folder: str, busy: bool) -> tuple[bool, Table | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(measure, "others_disturb", lambda *_: busy)
        t = SharedMemory(TorchDist())
        t.all_reduce(torch.ones(1), (1, 0))
        return table.load(2, table.cpu_device_name()) is not None, t.tune((1, 0))


def test_a_table_is_measured_once_and_kept(tmp_path: Path) -> None:
    (kept, one), (_, other) = pool(2).run(tuned, str(tmp_path), False)
    assert kept and one == other and isinstance(one, Table)


@pytest.mark.filterwarnings("ignore:other programs keep this host busy")
def test_a_table_that_others_disturbed_is_kept_only_by_hand(tmp_path: Path) -> None:
    (kept, one), (_, other) = pool(2).run(tuned, str(tmp_path), True)
    assert not kept and one == other and isinstance(one, Table)
