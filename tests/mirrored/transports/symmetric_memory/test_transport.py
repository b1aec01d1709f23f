"""The moves over memory that devices share, with memory of the host instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mirrored
from mirrored import current, use
from mirrored.transports.shared_memory import SharedMemory
from mirrored.transports.symmetric_memory import SymmetricMemory
from mirrored.transports.torch_dist import TorchDist
from mirrored.transports.tuning import measure, table
from mirrored.transports.tuning.table import Table
from tests.mirrored.transports.moves import DTYPES, all_moves, bits, numbers
from tests.mirrored.transports.symmetric_memory.host_memory import HostMemory
from tests.ranks import pool, simulate

_transports: dict[int, SymmetricMemory] = {}  # one a process and size of a slot


class Refusing(SharedMemory):
    """Says that a move came here."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("a move went to the transport below")

    all_reduce = all_reduce_async = reduce_scatter = join = turn = broadcast = peers = _refuse


def on_devices(slot: int, below: Callable[[TorchDist], SharedMemory]) -> SymmetricMemory:
    for ranks in range(2, 5):
        table.save(Table(), ranks, "cpu")  # that of the devices that the host stands in for
    return SymmetricMemory(below(TorchDist()), "cpu", slot, HostMemory)


def in_slots(rank: int, slot: int, one_shot: int, fn: Any, *args: Any) -> Any:
    """`fn(rank, *args)` with all of a tensor in a slot, or with most tensors too long."""
    if slot not in _transports:
        _transports[slot] = on_devices(slot, Refusing if slot > 4096 else SharedMemory)
    transport = _transports[slot]
    group = transport._group(torch.device("cpu"), tuple(range(transport.size)))
    assert group is not None
    group.set_one_shot(one_shot, one_shot)
    with use(transport):
        return fn(rank, *args)


def moves(rank: int, *args: Any) -> list[Tensor]:
    """All but lists of pieces, which go by messages."""
    return all_moves(rank, *args, lists=False)


@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from([2, 3, 4]),
    shape=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    scale=st.sampled_from([1, 1, 7, 40]),
    dtype=st.sampled_from([d for d in DTYPES if d != torch.float8_e4m3fn]),
    turned=st.booleans(),
    odd=st.booleans(),
    one_shot=st.sampled_from([0, 100, 1 << 20]),
    slot=st.sampled_from([4096, 1 << 20]),
)
def test_every_move_gives_the_bits_of_simulated_ranks(
    n: int,
    shape: list[int],
    scale: int,
    dtype: torch.dtype,
    turned: bool,
    odd: bool,
    one_shot: int,
    slot: int,
) -> None:
    shape = [shape[0] * scale, *shape[1:]]
    wanted = simulate(moves, n, n, shape, dtype, turned, odd)
    got = pool(n).run(in_slots, slot, one_shot, moves, n, shape, dtype, turned, odd)
    for rank in range(n):
        for k, (a, b) in enumerate(zip(got[rank], wanted[rank], strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b), (
                rank,
                k,
            )


def many(rank: int) -> list[bool]:
    """One after the other, so that each slot is written again while others may still read."""
    x, ranks, right = torch.arange(5000.0), (2, 0, 1), []
    for k in range(200):
        n = 1 + 37 * k % 5000
        total = mirrored.all_reduce(x[:n] + rank + k, ranks)
        right.append(torch.equal(total, 3 * (x[:n] + k) + 3))
    return right


@pytest.mark.parametrize("one_shot", [0, 1 << 20])
def test_slots_are_not_written_before_all_have_read_them(one_shot: int) -> None:
    for right in pool(3).run(in_slots, 1 << 20, one_shot, many):
        assert all(right) and len(right) == 200


def read_by_a_kernel(rank: int) -> list[bool]:
    ranks, x = (0, 1), numbers(rank, [6, 5], torch.bfloat16, odd=False)
    total = numbers(0, [6, 5], torch.bfloat16, False) + numbers(1, [6, 5], torch.bfloat16, False)
    with current().addends(x, 0, [4, 2], ranks) as (views, start):
        made = [
            len(views) == 2,
            start == (0, 4)[rank],
            torch.equal(views[0] + views[1], total),
        ]
    handle = current().all_reduce_async(x.clone(), ranks)
    return [*made, torch.equal(handle.wait(), total), current().shares(ranks, "cpu")]


def test_a_kernel_is_given_everybodys_tensor() -> None:
    assert all(map(all, pool(2).run(in_slots, 1 << 20, 0, read_by_a_kernel)))


def in_inference_mode(rank: int) -> float:
    transport, x = on_devices(1 << 20, Refusing), torch.ones(3)
    with torch.inference_mode():
        first = transport.all_reduce(x, (0, 1))
    return (first.sum() + transport.all_reduce(x.requires_grad_(), (0, 1)).sum()).item()


def test_memory_made_in_inference_mode_serve_after_it() -> None:
    assert pool(2).run(in_inference_mode) == [12.0, 12.0]


# ---- what goes wrong ----------------------------------------------------------------------------


def odd_one_out(rank: int, how: str) -> str:
    ranks, x = (0, 1), torch.ones(4, 2)
    try:
        match how:
            case "shape":
                mirrored.all_reduce(x[: 4 - rank], ranks)
            case "long":  # for a slot, on one of them
                mirrored.all_reduce(torch.ones(4 if rank else 1 << 19), ranks)
            case "sizes":
                mirrored.reduce_scatter(x, 0, [3, 1] if rank else [2, 2], ranks)
            case "cut":
                mirrored.reduce_scatter(x, 0, [1, 1], ranks)
            case "piece":
                mirrored.all_gather(x[: 4 - rank], 0, [4, 4], ranks)
            case "turned":
                mirrored.all_to_all(x, 1, [2, 0] if rank else [1, 1], 0, [4, 4], ranks)
            case "source":
                mirrored.broadcast(x, x.shape, x.dtype, "cpu", rank, ranks)
            case "promised":
                mirrored.broadcast(x, x.shape if rank else (4, 3), x.dtype, "cpu", 0, ranks)
            case "peers":
                with current().peers(x[: 4 - rank], ranks):
                    pass
        return "nothing was said"
    except (RuntimeError, ValueError) as error:
        assert mirrored.all_reduce(x, ranks).sum() == 16, "the next call works"
        return str(error)


SAID = {
    "shape": "rank 0 calls all_reduce(sum) of float32[4, 2] while rank 1 calls all_reduce(sum) of "
    "float32[3, 2]",
    "long": "rank 0 calls all_reduce(sum) of float32[524288] while rank 1",
    "sizes": "rank 0 sends 16 bytes to rank 1 in reduce_scatter(sum) of float32[4, 2] along dim 0, "
    "and rank 1 expects 8",
    "cut": "the sizes of the parts add up to 2, not to that of the dim",
    "piece": "rank 1 sends 24 bytes to rank 0 in all_gather of float32[3, 2] along dim 0, and "
    "rank 0 expects 32",
    "turned": "rank 0 sends 16 bytes to rank 1",
    "source": "broadcast of float32[4, 2] from rank 1",
    "promised": "rank 0 sends 32 bytes to rank 0 in broadcast of float32[4, 2] from rank 0, and "
    "rank 0 expects 48",
    "peers": "rank 0 calls peers of float32[4, 2] while rank 1 calls peers of float32[3, 2]",
}


@pytest.mark.parametrize("how", SAID)
def test_every_rank_names_the_two_calls_that_do_not_fit(how: str) -> None:
    said = pool(2).run(in_slots, 1 << 20, 0, odd_one_out, how)
    assert SAID[how] in said[0] and len(set(said)) == 1


def shared(rank: int) -> list[bool]:
    transport = on_devices(4096, SharedMemory)
    return [transport.shares((0, 1), "cpu", nbytes) for nbytes in (0, 4096, 4097)]


def test_what_is_longer_than_a_slot_is_not_shared() -> None:
    assert pool(2).run(shared) == [[True, True, False]] * 2


class Apart(HostMemory):
    """Memory that one rank can't make, with an error as torch's private names may raise any."""

    error: type[Exception]

    def __init__(self, nbytes: int, device: torch.device, ranks: Any, at: int, name: str) -> None:
        super().__init__(nbytes, device, ranks, at, name)
        if at == 1:
            raise self.error("the devices do not reach each other\nmore of it")


def without(rank: int, error: type[Exception]) -> tuple[float, bool, list[str]]:
    Apart.error = error
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        transport = SymmetricMemory(SharedMemory(TorchDist()), "cpu", 4096, Apart)
        totals = [transport.all_reduce(torch.ones(2), (0, 1, 2)).sum().item() for _ in range(2)]
    return (
        sum(totals),
        transport.shares((0, 1, 2), "cpu"),
        [*transport.why_not.values(), *(str(w.message) for w in met)],
    )


@pytest.mark.parametrize("error", [RuntimeError, ImportError, AttributeError, TypeError])
def test_one_device_that_others_do_not_reach_sends_all_to_the_transport_below(
    error: type[Exception],
) -> None:
    for total, shares, said in pool(3).run(without, error):
        assert total == 12 and not shares
        why = f"{error.__name__}: the devices do not reach each other"
        assert len(said) == 2 and said[0] == why and f"devices: {why}." in said[1]


class Shuffled(HostMemory):
    """Whose last rank sees the memory of the others in another order."""

    def __init__(self, nbytes: int, device: torch.device, ranks: Any, at: int, name: str) -> None:
        super().__init__(nbytes, device, ranks, at, name)
        if at == 2:
            self.memory[:2] = self.memory[1::-1]


def mixed_up(rank: int) -> tuple[list[float], bool, list[str]]:
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        transport = SymmetricMemory(SharedMemory(TorchDist()), "cpu", 4096, Shuffled)
        joined = transport.all_gather_into_tensor(
            torch.full((1,), float(rank)), 0, [1, 1, 1], (0, 1, 2)
        )
    return (
        joined.tolist(),
        transport.shares((0, 1, 2), "cpu"),
        [str(w.message) for w in met],
    )


def test_memory_that_does_not_work_is_not_used() -> None:
    for joined, shares, said in pool(3).run(mixed_up):
        assert joined == [0, 1, 2] and not shares
        assert len(said) == 1 and "a trial of" in said[0] and "all-gather" in said[0]


# ---- the table ----------------------------------------------------------------------------------


def by_the_table(rank: int, folder: str) -> tuple[float, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/{rank}")
        table.save(Table(), 2, table.cpu_device_name())
        table.save(Table(messages_above={"all_reduce": 8}), 2, "cpu")
        transport = SymmetricMemory(Refusing(TorchDist()), "cpu", 1 << 20, HostMemory)
        total = transport.all_reduce(torch.ones(2), (0, 1)).sum().item()
        try:
            transport.all_reduce(torch.ones(3), (0, 1))
        except AssertionError:
            return total, True
    return total, False


def test_moves_above_the_tables_size_go_to_the_transport_below(tmp_path: Path) -> None:
    assert pool(2).run(by_the_table, str(tmp_path)) == [(4.0, True)] * 2


def measured(rank: int, folder: str) -> tuple[bool, Table | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(measure, "others_disturb", lambda *_: False)
        table.save(Table(), 2, table.cpu_device_name())
        transport = SymmetricMemory(SharedMemory(TorchDist()), "cpu", 1 << 22, HostMemory)
        transport.all_reduce(torch.ones(1), (0, 1))
        return table.load(2, "cpu") is not None, transport.tune((0, 1))


def test_a_table_is_measured_once_and_kept(tmp_path: Path) -> None:
    (kept, one), (_, other) = pool(2).run(measured, str(tmp_path))
    assert kept and one == other and isinstance(one, Table)
