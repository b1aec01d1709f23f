from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import mirrored
from mirrored.transports.counting import counting
from mirrored.transports.default import current, use
from mirrored.transports.in_process import InProcess, InProcessState
from tests.mirrored.kinds import SIZES, everywhere, over_gloo, run
from tests.ranks import pool, simulate


def ring(rank: int, n: int) -> list[Tensor]:
    """Sends two tensors to the right, one to itself, and nothing to itself once more."""
    right, left = (rank + 1) % n, (rank - 1) % n
    sends = [
        (right, torch.full((2,), rank)),
        (rank, torch.tensor(rank)),
        (right, torch.ones(0, 3)),
    ]
    sends += [(right, torch.tensor([rank > 0]))]
    receives = [
        (left, (2,), torch.int64),
        (rank, (), torch.int64),
        (left, (0, 3), torch.float32),
        (left, (1,), torch.bool),
    ]
    return current().exchange(sends, receives, tuple(range(n)))


@everywhere
@pytest.mark.parametrize("n", SIZES[1:])
def test_exchange_matches_messages_in_order_and_never_deadlocks(where: str, n: int) -> None:
    for rank, (pair, own, empty, flag) in enumerate(run(where, ring, n, n)):
        left = (rank - 1) % n
        assert pair.tolist() == [left, left] and own.item() == rank
        assert empty.shape == (0, 3) and flag.tolist() == [left > 0]


def is_let_go(rank: int, n: int, numbers: int) -> bool:
    """Whether the memory of a message is freed while the handle by which it was sent exists."""
    x = torch.full((numbers,), float(rank))
    left = weakref.ref(x.untyped_storage())
    going = current().send(x, (rank + 1) % n, "x")
    del x
    came = current().receive((numbers,), torch.float32, (rank - 1) % n, "x", "cpu").wait()
    assert came.eq((rank - 1) % n).all()
    deadline = time.monotonic() + 10  # a thread of the sender lets go of it
    while left() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    going.wait()
    return left() is None


@everywhere
@pytest.mark.parametrize("numbers", [0, 10, 1 << 20])
def test_the_handle_of_a_send_does_not_hold_the_message(where: str, numbers: int) -> None:
    assert run(where, is_let_go, 2, 2, numbers) == [True, True]


def objects(rank: int, ranks: tuple[int, ...]) -> Any:
    return current().gather_objects({"rank": rank}, ranks) if rank in ranks else None


@everywhere
def test_gather_objects_keeps_the_order_of_ranks(where: str) -> None:
    expected = [{"rank": 2}, {"rank": 0}]
    assert run(where, objects, 3, (2, 0)) == [expected, None, expected]


def several(rank: int, n: int, dtype: torch.dtype, long: int) -> None:
    t, ranks = current(), tuple(range(n))
    generator = torch.Generator().manual_seed(0)
    shapes, dims = [(7 * long, 3), (5,), (2, 4, 3), (0, 2)], [0, 0, -2, 1]
    wholes = [torch.randint(9, s, generator=generator).to(dtype) for s in shapes]
    cuts = [
        [len(part) for part in torch.arange(x.shape[d]).tensor_split(n)]
        for x, d in zip(wholes, dims, strict=True)
    ]
    mine = [x.split(cut, d)[rank] for x, d, cut in zip(wholes, dims, cuts, strict=True)]
    with counting() as log:
        logged = log.all_gather_several(mine, dims, cuts, ranks)
        log.reduce_scatter_several(wholes, dims, cuts, ranks)
    joined = t.all_gather_several(mine, dims, cuts, ranks)
    one_by_one = sum(x.nbytes for x in mine) * (n - 1)
    rest = sum(x.nbytes for x in wholes) - sum(x.nbytes for x in mine)
    assert log.names == ["all_gather", "all_to_all"][: 2 * (n > 1)]
    assert log.bytes == (one_by_one + rest if n > 1 else 0)
    into = [torch.empty_like(x) for x in wholes]
    t.all_gather_several(mine, dims, cuts, ranks, into)
    for got in (joined, logged, into):
        assert all(torch.equal(a, b) for a, b in zip(got, wholes, strict=True))
    addends = [x * (rank + 1) for x in wholes]
    sums = t.reduce_scatter_several(addends, dims, cuts, ranks)
    for x, d, cut, got in zip(addends, dims, cuts, sums, strict=True):
        assert torch.equal(got, t.reduce_scatter(x, d, cut, ranks)) and got.is_contiguous()


@everywhere
@pytest.mark.parametrize("long", [1, 30_000])
@pytest.mark.parametrize("n", SIZES)
def test_several_tensors_move_as_each_alone(where: str, n: int, long: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        run(where, several, n, n, dtype, long)


def not_fitting(rank: int) -> str:
    t, ranks = current(), (0, 1)
    x = torch.ones(2 + 2 * rank, 2)
    try:
        # As many bytes from each rank in all, but other tensors.
        t.all_gather_several([x, torch.ones(4 - 2 * rank, 2)], [0, 0], [[2, 2], [4, 4]], ranks)
        return "nothing was said"
    except (RuntimeError, ValueError) as error:
        assert t.all_reduce(torch.ones(60), ranks).sum() == 120, "the next call works"
        return str(error)


def test_several_tensors_that_do_not_fit_raise_on_all_ranks() -> None:
    said = pool(2).run(not_fitting)
    assert said[0] == said[1] and "all_gather of float32, 2 tensors" in said[0]


def another_piece(rank: int) -> tuple[str, ...]:
    """What is said of two tensors whose shapes are each other's."""
    t, ranks, said = current(), (0, 1), []
    for join in (t.all_gather_several, t.start_all_gather_several):
        xs = [torch.ones(4, 2), torch.ones(2, 2)]
        try:
            join(xs, [0, 0], [[2, 2], [4, 4]], ranks)
        except ValueError as error:
            said.append(str(error))
    return tuple(said)


def test_a_piece_has_the_shape_that_was_promised() -> None:
    for said in pool(2).run(over_gloo, another_piece):
        assert len(said) == 2
        assert all("x has shape (4, 2), but (2, 2) was promised" in each for each in said)


def overlapped(rank: int) -> list[float]:
    t = current()
    handles = [t.all_reduce_async(torch.full((n,), float(rank)), (2, 0, 1)) for n in (3, 200_000)]
    return [handle.wait()[-1].item() for handle in reversed(handles)]


@everywhere
def test_async_reductions_may_be_waited_for_in_any_order(where: str) -> None:
    assert run(where, overlapped, 3) == [[3.0, 3.0]] * 3


def new_memory(rank: int, n: int) -> bool:
    ranks, t = tuple(range(n)), current()
    x = torch.ones(2)
    results = [t.all_reduce(x, ranks), t.broadcast(x, (2,), x.dtype, "cpu", 0, ranks)]
    results += t.all_gather(x, [(2,)] * n, ranks) + t.all_to_all([x] * n, [(2,)] * n, ranks)
    for y in results:
        y.zero_()
    return bool((x == 1).all())


@everywhere
@pytest.mark.parametrize("n", [1, 2])
def test_results_never_share_memory_with_inputs(where: str, n: int) -> None:
    assert all(run(where, new_memory, n, n))


def test_one_process_is_rank_0_of_1() -> None:
    x = torch.ones(3)
    assert current().rank == 0 and current().size == 1
    assert torch.equal(mirrored.all_reduce(x, (0,)), x)


def test_two_ranks_need_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        mirrored.all_reduce(torch.ones(3), (0, 1))
    with pytest.raises(RuntimeError, match="init_process_group"):
        mirrored.broadcast(torch.ones(1), (1,), torch.float32, "cpu", 0, (0, 1))


def outsider(rank: int) -> None:
    mirrored.all_reduce(torch.ones(1), (0, 7))


def test_rank_outside_the_group_is_told() -> None:
    with (
        pytest.raises(ValueError, match=r"rank 1 is not one of the ranks \(0, 7\)"),
        use(InProcess(InProcessState(2), 1)),
    ):
        outsider(1)


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="meta tensor"):
        mirrored.all_reduce(torch.ones(1, device="meta"), (0,))


def test_wrong_own_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\), but \(3,\) was promised"):
        current().all_gather(torch.ones(2), [(3,)], (0,))


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="For a mean, sum and then divide"):
        mirrored.all_reduce(torch.ones(2), (0,), "mean")


def test_use_holds_for_one_thread_and_nests() -> None:
    outer, inner = InProcess(InProcessState(2), 0), InProcess(InProcessState(2), 1)
    with use(outer):
        with use(inner):
            assert current() is inner
        assert current() is outer
        assert simulate(lambda rank: current().rank, 2) == [0, 1]
    assert current().size == 1


class Elsewhere(TorchFunctionMode):
    """Makes what a program asks for on another device, as one that records stages does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return torch.device("meta") if func is torch.device else func(*args, **(kwargs or {}))


def test_no_mode_of_the_program_changes_where_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with Elsewhere():
        assert torch.device("cuda", 3).type == "meta"
        kinds = [current().device(kind) for kind in ("cpu", "cuda")]
    assert [str(kind) for kind in kinds] == ["cpu", "cuda:3"]


def test_a_program_of_one_process_is_rank_0_of_1_without_a_process_group() -> None:
    assert not torch.distributed.is_initialized()
    assert (mirrored.current().rank, mirrored.current().size) == (0, 1)
