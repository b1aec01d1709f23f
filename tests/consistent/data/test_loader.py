"""loader: the batches of one process, read in parts."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
    random_split,
)

import consistent
from consistent import B, P, Placement, S
from consistent.data import loader
from mirrored.transports.counting import counting
from tests.ranks import on_ranks
from tests.twins import GRIDS, assert_same


class Rows(Dataset):
    """Item i holds the number i, in each of the containers that batches come in; it notes what
    was read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        self.read.append(index)
        x = torch.tensor([index, index + 0.5])
        return {"x": x, "pair": (x.long(), index), "name": f"row {index}"}


class Words(Dataset):
    """Item i is a list of i + 1 numbers."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> list[int]:
        if index >= 7:
            raise IndexError(index)
        return list(range(1, index + 2))


class Stream(IterableDataset):
    """0, 1, 2, ...; each worker gives its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, by = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor([float(n)]) for n in range(first, self.count, by))


class Noise(Dataset):
    """Each item is a random number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 12:
            raise IndexError(index)
        return torch.rand(2, dtype=torch.float64)


class Fails(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise FileNotFoundError("row 5 is not there")
        return super().__getitem__(index)


class Pair(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


def pad_to_longest(items: list[list[int]]) -> dict[str, torch.Tensor]:
    length = max(map(len, items))
    ids = torch.tensor([each + [0] * (length - len(each)) for each in items])
    return {"ids": ids, "labels": torch.where(ids == 0, -100, ids)}


def stacked(items: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([x for (x,) in items])


def named(items: list[dict[str, Any]]) -> Pair:
    return Pair(torch.stack([i["x"] for i in items]), torch.tensor([i["pair"][1] for i in items]))


def plain(batch: Any) -> Any:
    """The batch as one process has it."""
    if isinstance(batch, torch.Tensor):
        return batch.full() if isinstance(batch, consistent.GlobalTensor) else batch
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, str):  # as a tensor of its letters
        return torch.tensor(list(batch.encode()))
    return [plain(each) for each in batch]


def compare(given: Any, wanted: Any) -> None:
    given, wanted = [plain(batch) for batch in given], [plain(batch) for batch in wanted]
    assert len(given) == len(wanted)
    assert_same(given, wanted)


@contextmanager
def may_have_children() -> Iterator[None]:
    """Processes of the pool are daemons, which may start no workers."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["daemon"] = config["daemon"], False
    try:
        yield
    finally:
        config["daemon"] = before


def everywhere(ranks: int) -> Placement:
    return Placement("cpu", range(ranks))


@on_ranks(2, 3, 4)
def test_batches_are_those_of_one_process(rank: int) -> None:
    """Two epochs in the same order, with a last batch of one item, which most ranks do not have."""
    count = torch.distributed.get_world_size()
    for options in (
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 6},
        {"batch_size": 6, "drop_last": True, "shuffle": True},
        {"batch_sampler": [[3, 1], [0, 2, 4, 5, 12]]},
        {"sampler": RandomSampler(range(13), replacement=True, num_samples=9), "batch_size": 5},
    ):
        torch.manual_seed(3)
        one: Any = DataLoader(Rows(13), **options)
        wanted = [batch for _ in range(2) for batch in one]
        torch.manual_seed(3)
        batches = loader(DataLoader(Rows(13), **options), everywhere(count))
        assert len(batches) == len(one)
        compare([batch for _ in range(2) for batch in batches], wanted)
        assert batches.epoch == 2


@on_ranks(2, 3)
def test_a_rank_reads_its_part_only(rank: int) -> None:
    count = torch.distributed.get_world_size()
    rows = Rows(12)
    (batch,) = loader(DataLoader(rows, batch_size=12), everywhere(count))
    size = 12 // count
    assert rows.read == list(range(rank * size, (rank + 1) * size))
    assert batch["name"] == [f"row {n}" for n in range(12)]
    assert batch["x"].sbp == (S(0),) and batch["x"].to_local().shape == (size, 2)


@on_ranks(4)
def test_ranks_along_an_axis_that_does_not_split_items_read_the_same(rank: int) -> None:
    for grid, sbp, own in (
        ([[0, 1], [2, 3]], None, [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]),
        ([[0, 1], [2, 3]], (B, S(0)), [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]),
        ([[0, 1], [2, 3]], (S(0), S(0)), [[0, 1], [2], [3], [4]]),
        ([3, 0, 1, 2], B, [[0, 1, 2, 3, 4]] * 4),
        ([1, 0], S(0), [[3, 4], [0, 1, 2]]),
    ):
        rows = Rows(5)
        (batch,) = loader(DataLoader(rows, batch_size=5), Placement("cpu", grid), sbp)
        assert batch["x"].full()[:, 0].tolist() == [0, 1, 2, 3, 4]
        if rank < len(own):
            assert rows.read == own[rank]


@on_ranks(2, 3, 4)
def test_a_batch_may_be_split_along_another_dim_as_well(rank: int) -> None:
    placement = Placement("cpu", GRIDS[torch.distributed.get_world_size()])
    data = TensorDataset(torch.arange(35.0).view(5, 7), torch.arange(5))
    sbp = (S(0), S(1)) if placement.ndim == 2 else (S(1),)
    one = DataLoader(data, batch_size=3)
    batches = list(loader(one, placement, sbp))
    compare(batches, one)
    assert batches[0][0].sbp == sbp
    assert batches[0][1].sbp[-1] is B  # labels have no dim 1


@on_ranks(2, 3)
def test_named_tuples_and_single_tensors_keep_their_kind(rank: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    one = DataLoader(Rows(5), batch_size=4, collate_fn=named)
    batches = list(loader(one, place))
    assert all(type(batch) is Pair for batch in batches)
    compare(batches, one)
    single: Any = DataLoader(torch.arange(5.0), batch_size=2)  # type: ignore[arg-type]
    compare(loader(single, place), single)


@on_ranks(2)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_in_other_processes(rank: int, method: str) -> None:
    context = "fork" if rank else method  # a new interpreter takes seconds, so one rank has one
    options: dict[str, Any] = {
        "batch_size": 3, "num_workers": 1, "multiprocessing_context": context
    }  # fmt: skip
    torch.manual_seed(4)
    one = DataLoader(Rows(8), batch_size=3, shuffle=True)
    wanted = list(one)
    torch.manual_seed(4)
    rows = Rows(8)
    with may_have_children():
        compare(loader(DataLoader(rows, shuffle=True, **options), everywhere(2)), wanted)
    assert rows.read == []


@on_ranks(2, 3)
def test_a_stream_is_divided_too(rank: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    for drop_last in (False, True):
        one = DataLoader(Stream(10), batch_size=4, drop_last=drop_last)
        compare(loader(one, place), one)
    made = DataLoader(Stream(3), batch_size=None)  # the stream makes its batches: [1]
    compare(loader(made, place), made)


@on_ranks(2)
def test_workers_of_a_stream_each_give_their_own(rank: int) -> None:
    # A process of a pool would start workers as it was started, from another new interpreter.
    halves = DataLoader(Stream(9), batch_size=3, num_workers=2, multiprocessing_context="fork")
    with may_have_children():
        compare(loader(halves, everywhere(2)), halves)


@on_ranks(2, 3)
def test_the_data_set_may_make_the_batches(rank: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    one: Any = DataLoader([torch.arange(5.0), torch.arange(2.0)], batch_size=None)  # type: ignore
    batches = list(loader(one, place))
    compare(batches, one)
    assert batches[0].sbp == (S(0),)


@on_ranks(2, 3)
def test_parts_of_other_lengths_raise_and_say_what_to_do(rank: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    one = DataLoader(Words(), batch_size=6, collate_fn=pad_to_longest)
    with pytest.raises(ValueError, match=r"(?s)\['ids'\].*rank 0.*pad=.*whole=True"):
        next(iter(loader(one, place)))
    with pytest.raises(ValueError, match=r"batch\['labels'\].*does not say"):
        next(iter(loader(one, place, pad={"ids": 0})))
    compare(loader(one, place, pad={"ids": 0, "labels": -100}), one)
    compare(loader(one, place, whole=True), one)


@on_ranks(2, 3)
def test_random_reading_does_not_change_the_order(rank: int) -> None:
    """Ranks read different numbers of items, each of which draws from torch's generator: the next
    epoch's order, drawn from it too, is still the same on every rank."""
    place = everywhere(torch.distributed.get_world_size())
    batches = loader(DataLoader(Noise(), batch_size=5, shuffle=True), place)
    seen = torch.cat([batch.full() for _ in range(2) for batch in batches])
    assert len(seen.unique()) == seen.numel()  # no rank draws the numbers of another


@on_ranks(2, 3)
def test_orders_that_differ_by_rank_raise(rank: int) -> None:
    torch.manual_seed(rank)
    batches = loader(
        DataLoader(Rows(40), batch_size=4, shuffle=True),
        everywhere(torch.distributed.get_world_size()),
    )
    with pytest.raises(RuntimeError, match=r"(?s)different batches.*Seed every rank alike"):
        list(batches)


@on_ranks(2, 3)
def test_data_that_ends_earlier_on_a_rank_raises_on_all(rank: int) -> None:
    one = DataLoader(Stream(4 + 4 * (rank == 1)), batch_size=4)
    with pytest.raises(RuntimeError, match=r"has ended on ranks \[0"):
        list(loader(one, everywhere(torch.distributed.get_world_size())))


@on_ranks(2, 3)
def test_an_error_while_reading_is_raised_on_every_rank(rank: int) -> None:
    """The rank that reads the row raises the error itself, the others one that names it."""
    count = torch.distributed.get_world_size()
    batches = loader(DataLoader(Fails(6), batch_size=6), everywhere(count))
    kind = FileNotFoundError if rank == count - 1 else RuntimeError
    with pytest.raises(kind, match="row 5 is not there"):
        list(batches)


@on_ranks(2)
def test_what_cannot_be_read_in_parts_raises(rank: int) -> None:
    place = everywhere(2)
    data = TensorDataset(torch.zeros(4, 2))
    one = DataLoader(data, batch_size=2)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "read in pieces", lambda: loader(one, place, P)),
        (ValueError, "counted from the front", lambda: loader(one, place, S(-1))),
        (ValueError, "1 axes", lambda: loader(one, place, (S(0), B))),
        (TypeError, "batch_size cannot be changed", lambda: loader(one, place, batch_size=3)),
        (TypeError, "DistributedSampler", lambda: loader(
            DataLoader(data, sampler=DistributedSampler(data)), place)),
        (TypeError, "holds a global tensor", lambda: loader(
            TensorDataset(consistent.zeros(4, 2, placement=place, sbp=B)), place)),
        (ValueError, "dim 0 of a tensor counts", lambda: list(loader(
            DataLoader(data, batch_size=4, collate_fn=lambda _: torch.zeros(3)), place))),
        (RuntimeError, "one value for the whole batch", lambda: list(loader(
            DataLoader(data, batch_size=4, collate_fn=lambda _: torch.tensor(rank)), place))),
        (RuntimeError, "same fields", lambda: list(loader(
            DataLoader(data, batch_size=4, collate_fn=lambda i: {rank: stacked(i)}), place))),
    ]  # fmt: skip
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()


def _resumed(one: Any, place: Placement, after: int, **options: Any) -> list[Any]:
    """The batches of two epochs, by two loaders: the second goes on where the first stopped after
    ``after`` batches, and the program draws other numbers in between."""
    torch.manual_seed(7)
    first = loader(one(), place, **options)
    found = []
    while len(found) < after:
        for batch in first:
            found.append(plain(batch))
            if len(found) == after:
                break
    state, rng = first.state_dict(), torch.get_rng_state()
    torch.manual_seed(8)
    second = loader(one(), place, **options)
    second.load_state_dict(state)
    torch.set_rng_state(rng)
    while second.epoch < 2:
        found += [plain(batch) for batch in second]
    return found


@on_ranks(2, 3)
def test_goes_on_where_it_stopped(rank: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    for one in (
        lambda: DataLoader(Rows(13), batch_size=4, shuffle=True),
        lambda: DataLoader(
            Rows(13), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
        ),
        lambda: DataLoader(Rows(13), batch_sampler=list(BatchSampler(range(13), 5, False))),  # type: ignore
        lambda: DataLoader(Stream(13), batch_size=4),
    ):
        torch.manual_seed(7)
        whole = one()
        wanted = [plain(batch) for _ in range(2) for batch in whole]
        for after in (1, 3, len(whole) if not isinstance(whole.dataset, Stream) else 4, 6):
            assert_same(_resumed(one, place, after), wanted, f"after {after}")


@on_ranks(3)
def test_goes_on_over_other_ranks_and_in_batches_of_another_size(rank: int) -> None:
    def one(size: int) -> DataLoader:
        return DataLoader(Rows(11), size, shuffle=True, generator=torch.Generator().manual_seed(2))

    order = torch.cat([batch["x"] for batch in one(11)])
    first = loader(one(4), Placement("cpu", [0, 1]))
    next(iter(first))
    second = loader(one(5), Placement("cpu", [2, 1, 0]))
    second.load_state_dict(first.state_dict())
    rest = [batch["x"].full() for batch in second]
    assert [len(batch) for batch in rest] == [5, 2]
    assert torch.equal(torch.cat(rest), order[4:])


@on_ranks(2)
def test_a_position_inside_a_batch_of_the_users_own_raises(rank: int) -> None:
    batches = loader(DataLoader(Rows(8), batch_sampler=[[0, 1, 2], [3, 4]]), everywhere(2))  # type: ignore
    state = batches.state_dict() | {"items": 2}
    batches.load_state_dict(state)
    with pytest.raises(ValueError, match=r"after 2 items, and a batch ends after 3"):
        list(batches)


@on_ranks(2)
def test_an_epoch_that_was_left_early_is_over(rank: int) -> None:
    batches = loader(DataLoader(Rows(8), batch_size=2), everywhere(2))
    for _ in batches:
        break
    assert len(list(batches)) == 4 and batches.epoch == 2


@on_ranks(3)
def test_a_rank_outside_the_placement_knows_the_shapes(rank: int) -> None:
    batches = list(loader(DataLoader(Rows(5), batch_size=4), Placement("cpu", [2, 0])))
    assert [tuple(batch["x"].shape) for batch in batches] == [(4, 2), (1, 2)]
    assert batches[1]["pair"][1].tolist() == [4]


@on_ranks(2)
def test_nothing_is_sent_where_parts_are_alike_by_their_kind(rank: int) -> None:
    data = TensorDataset(torch.arange(12.0))
    for sampler, sends in ((SequentialSampler(data), False), (RandomSampler(data), True)):
        batches = loader(DataLoader(data, batch_size=2, sampler=sampler), everywhere(2))
        reading = iter(batches)
        for _ in range(4):  # the first ones are compared always
            next(reading)
        with counting() as counted:
            assert len(list(reading)) == 2
            list(batches)
        # Two batches and the end, then six and the end, 8 bytes each.
        assert [call.bytes for call in counted.calls] == ([8] * 10 if sends else [])


@on_ranks(2, 3)
@pytest.mark.parametrize("rows", [9, 8])
def test_data_of_another_length_on_a_rank_raises_on_all(rank: int, rows: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    for make in (lambda n: TensorDataset(torch.arange(float(n))), Rows):
        one = DataLoader(make(rows if rank == 1 else 10), batch_size=4)
        with pytest.raises(ValueError, match=rf"rank 0: 10 items.*\n.*rank 1: {rows} items"):
            loader(one, place)
    with pytest.raises(ValueError, match="rank 1: 10 items, batches of 3"):
        loader(TensorDataset(torch.arange(10.0)), place, batch_size=3 if rank == 1 else 4)


@on_ranks(2)
def test_a_subset_drawn_otherwise_on_a_rank_raises(rank: int) -> None:
    torch.manual_seed(rank)
    half, _ = random_split(TensorDataset(torch.arange(12.0)), [6, 6])
    with pytest.raises(ValueError, match="a Subset, checksum"):
        loader(DataLoader(half, batch_size=2), everywhere(2))


@on_ranks(4)
@pytest.mark.parametrize("whole", [False, True])
def test_values_that_differ_where_ranks_read_the_same_raise(rank: int, whole: bool) -> None:
    """Ranks 2 and 3 read the second half of each batch, and have other values of it."""
    for data in (
        TensorDataset(torch.arange(8.0) + (rank == 3)),
        Noise(),  # drawn while it is read, from unequal seeds
    ):
        torch.manual_seed(rank)
        place = Placement("cpu", [[0, 1], [2, 3]])
        batches = loader(DataLoader(data, batch_size=4), place, (S(0), B), whole=whole)
        with pytest.raises(RuntimeError, match=r"(?s)same items.*rank 3.*seeded alike.*S\(0\)"):
            next(iter(batches))
        with consistent.plain_may_differ():
            next(iter(batches))


@on_ranks(3)
def test_values_of_a_rank_outside_the_placement_may_differ(rank: int) -> None:
    data = TensorDataset(torch.arange(8.0) + (rank == 1))
    for sbp in (B, S(0)):
        compare(
            loader(DataLoader(data, batch_size=4), Placement("cpu", [0, 2]), sbp),
            [[torch.arange(4.0)], [torch.arange(4.0, 8.0)]],
        )


@on_ranks(2, 3)
def test_goes_on_between_two_epochs(rank: int) -> None:
    """The second epoch has the order that it would have had, from whichever generator it is."""
    place = everywhere(torch.distributed.get_world_size())
    for given in (False, True):

        def one(given: bool = given) -> DataLoader:
            generator = torch.Generator().manual_seed(5) if given else None
            return DataLoader(Rows(9), batch_size=4, shuffle=True, generator=generator)

        torch.manual_seed(6)
        first = loader(one(), place)
        list(first)
        state, rng = first.state_dict(), torch.get_rng_state()
        wanted = [plain(batch) for batch in first]
        torch.manual_seed(7)
        second = loader(one(), place)
        second.load_state_dict(state)
        torch.set_rng_state(rng)
        assert second.epoch == 1
        compare(second, wanted)


@on_ranks(2, 3)
def test_a_signal_to_one_rank_ends_the_iteration_of_all(rank: int) -> None:
    place = everywhere(torch.distributed.get_world_size())
    batches = loader(DataLoader(Rows(12), batch_size=2), place)
    before = signal.getsignal(signal.SIGUSR2)
    try:
        batches.stop_on(signal.SIGUSR2)
        seen = []
        for batch in batches:
            seen.append(plain(batch))
            if len(seen) == 2 and rank == 1:
                signal.raise_signal(signal.SIGUSR2)
        assert batches.stopped and len(seen) == 2
        rest = [plain(batch) for batch in batches]
        assert not batches.stopped and batches.epoch == 1
        compare(seen + rest, DataLoader(Rows(12), batch_size=2))
    finally:
        signal.signal(signal.SIGUSR2, before)
