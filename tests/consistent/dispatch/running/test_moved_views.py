"""A view that boxing moved reads what its source holds, as a view does on one device."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from consistent.dispatch.running import moved_views
from consistent.spec import B, P, Placement, S
from consistent.tensor.making.create import distribute
from mirrored.transports.counting import counting
from tests.ranks import ALL, on_ranks, pool
from tests.twins import Laid, assert_same

# [4, 6] split by columns, and by rows on an axis of one rank, so that no dim of the result of a
# view that joins them is split: none of these is a view of the shards.
VIEWS: dict[str, Any] = {
    "view": lambda x: x.view(-1),
    "select": lambda x: x[:, 4],
    "narrow": lambda x: x[:, 1:4],
    "split": lambda x: x.split([1, 5], 1)[1],
    "unbind": lambda x: torch.unbind(x, 1)[3],
    "as a keyword": lambda x: torch.narrow(input=x, dim=1, start=1, length=4),
    "of a view": lambda x: x.view(-1)[3:7],
    "reshape": lambda x: x.reshape(4, 3, 2),
    "flatten": lambda x: x.view(-1)[None].flatten(),
    "reshape that joins dims": lambda x: x.reshape(-1),
    "reshape that joins some": lambda x: x.reshape(2, 12),
    "reshape of a reshape": lambda x: x.reshape(-1).reshape(6, 4).reshape(-1)[2:9],
    "flatten that joins dims": lambda x: x.flatten(),
    "reshape that copies": lambda x: x.t().reshape(-1),
    "reshape of a part, which copies": lambda x: x[:, 1:5].reshape(-1),
    "reshape of a part of rows, which copies": lambda x: x[1:, 1:5].reshape(3, 2, 2).reshape(-1),
    "reshape of something expanded": lambda x: x[:, :1].expand(4, 6).reshape(-1),
    "reshape of an op's result": lambda x: (x.t() * 1.0).reshape(-1),
    "detach": lambda x: x.view(-1).detach(),
    "data": lambda x: x.view(-1).data,
    "reshape of a row": lambda x: x.narrow(0, 1, 1).narrow(1, 3, 1).reshape(-1),
    "of a view of a view": lambda x: x.view(-1).view(6, 4)[2].view(2, 2).t(),
}
WRITES: dict[str, Any] = {
    "add_": lambda x: x.add_(1),
    "index": lambda x: x.__setitem__((slice(None), 4), 7.0),
    "through another view": lambda x: x[1].mul_(3),
    "twice": lambda x: (x.add_(1), x.mul_(x)),
}
READS: dict[str, Any] = {
    "an op": lambda v: (v * 2).full(),
    "full": lambda v: v.full(),
    "item": lambda v: torch.tensor(v.sum().item()),
    "boxing": lambda v: v.to_global(sbp=(B,) * v.placement.ndim).to_local(),
    "a keyword": lambda v: torch.mul(input=v, other=v).full(),
    "a list": lambda v: torch.stack([v, v]).full(),
}


def _given(ours: bool, ranks: int, moves: bool = True) -> Any:
    x = torch.arange(24.0, dtype=torch.float64).view(4, 6).contiguous()
    if not ours:
        return x
    if not moves:  # views that join dims are views of the shards then, whose runs have gaps
        return distribute(x, Placement("cpu", range(ranks)), S(1))
    return distribute(x, Placement("cpu", [[r] for r in range(ranks)]), (S(1), S(0)))


def _read_after_writes(rank: int, ranks: int, moves: bool) -> list[str]:
    wrong = []
    for (i, view), (j, read), (k, write) in itertools.product(
        *map(enumerate, (VIEWS, READS, WRITES))
    ):
        if not ALL and (i + j + moves) % len(WRITES) != k:
            continue  # each pair of a view and a read is tried after one of the writes, in turn
        take, look, change = VIEWS[view], READS[read], WRITES[write]
        found = []
        for ours in (True, False):
            x = _given(ours, ranks, moves)
            v = take(x)
            change(x)
            plain = look if ours else PLAIN[read]
            found += [plain(v)]
            change(x)
            found += [plain(v), x.full() if ours else x]
        if not all(map(torch.equal, found[:3], found[3:])):
            wrong.append(f"{view}, {write}, {read}: {found[:3]}, not {found[3:]}")
    return wrong


PLAIN: dict[str, Any] = {
    "an op": lambda v: v * 2,
    "full": lambda v: v.clone(),
    "item": lambda v: torch.tensor(v.sum().item()),
    "boxing": lambda v: v.clone(),
    "a keyword": lambda v: torch.mul(input=v, other=v),
    "a list": lambda v: torch.stack([v, v]),
}


# Of six columns each of two ranks holds three; of four, two or one, which shows what two do.
@pytest.mark.parametrize(("ranks", "moves"), [*([(2, True)] if ALL else []), (4, True), (2, False)])
def test_a_moved_view_reads_what_was_written_into_its_source(ranks: int, moves: bool) -> None:
    assert pool(ranks).run(_read_after_writes, ranks, moves) == [[]] * ranks


def _of_one_element(rank: int) -> list[list[float]]:
    """Which of a layout's ranks holds an element has nothing to say about what is a view."""
    found = []
    for layout in ((B, S(1)), (S(1), B), (S(0), S(1)), (S(1), S(1))):
        x = distribute(torch.ones(1, 1), Placement("cpu", [[0, 1], [2, 3]]), layout)
        v = x.reshape(-1)
        x.add_(1)
        v.mul_(3)
        found.append([v.item(), x.item()])
    return found


def test_a_reshape_of_one_element_is_a_view() -> None:
    assert pool(4).run(_of_one_element) == [[[6.0, 6.0]] * 4] * 4


def _gradients(rank: int) -> list[bool]:
    found = []
    for ours in (True, False):
        leaf = _given(ours, 2).requires_grad_()
        w = torch.linspace(-1, 2, 24, dtype=torch.float64)
        x = leaf * 3
        v = x.view(-1)
        x.mul_(leaf)  # part of v's history from now on
        y = (v * w).sum()
        (grad,) = torch.autograd.grad(y, leaf)
        with torch.no_grad():
            found += [y.item(), grad.full() if ours else grad, v.requires_grad]
    return [
        abs(found[0] - found[3]) < 1e-9, torch.allclose(found[1], found[4]), found[2] == found[5]
    ]  # fmt: skip


def test_gradients_go_through_what_was_written() -> None:
    assert pool(2).run(_gradients) == [[True] * 3] * 2


def _costs(rank: int) -> list[Any]:
    x = _given(True, 2)
    with counting() as log:
        v = x.view(-1)
    once = log.names
    with counting() as log:
        v + 1, v * 2
    untouched = log.names
    with counting() as log:
        x.add_(1)
        x.add_(1)
    written = log.names
    with counting() as log:
        v + 1, v * 2
    return [untouched, written, once != [] and log.names == once]


def test_it_is_taken_again_once_a_write_and_only_when_read() -> None:
    assert pool(2).run(_costs) == [[[], [], True]] * 2


def _alive(rank: int) -> list[int]:
    gc.collect()
    before, x = len(moved_views.alive), _given(True, 2)
    local, moved = x.view(2, 2, 6), x.view(-1)
    row = moved[2:5]
    counts = [len(moved_views.alive) - before]
    del moved
    counts.append(len(moved_views.alive) - before)  # row is a view of it
    del row, local
    return [*counts, len(moved_views.alive) - before]


def test_ties_end_with_their_views() -> None:
    assert pool(2).run(_alive) == [[2, 2, 0]] * 2


def _into(dtype: torch.dtype) -> list[str]:
    """Writes into moved views, one after the other, and what is seen of each afterwards."""
    wrong = []
    for i, (view, take) in enumerate(VIEWS.items()):
        for j, (write, change) in enumerate(INTO.items()):
            if not ALL and (i + j) % 2 != (dtype is torch.int32):
                continue  # of the other dtype
            seen = []
            for ours in (True, False):
                x = (_given(ours, 2) % 7).to(dtype)
                other, v = x.view(-1), take(x)
                change(v)
                x.add_(1)
                change(take(x))
                seen.append([t.full() if ours else t for t in (x, v, other)])
            if not all(map(torch.equal, *seen)):
                wrong.append(f"{view}, {write}: {seen[0]}, not {seen[1]}")
    return wrong


INTO: dict[str, Any] = {
    "add_": lambda v: v.add_(2),
    "+=": lambda v: v.__iadd__(3),
    "mul_ by itself": lambda v: v.mul_(v),
    "index": lambda v: v.__setitem__(0, 5),
    "mask": lambda v: v.__setitem__(v > 3, 1),
    "fill_ and zero_": lambda v: (v.fill_(4), v[:1].zero_()),
    "copy_": lambda v: v.copy_(torch.ones(v.shape)),
    "again": lambda v: (v.add_(1), v.sub_(2), v.abs_()),
}


def _into_on_ranks(rank: int, dtype: torch.dtype) -> list[str]:
    return _into(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, *([torch.float32] if ALL else []), torch.int32])
def test_what_is_written_into_a_moved_view_is_in_its_source(dtype: torch.dtype) -> None:
    assert pool(2).run(_into_on_ranks, dtype) == [[]] * 2


def _odd_numbers(rank: int) -> bool:
    x = _given(True, 2)
    x.view(-1)[3:6] = torch.tensor([float("nan"), float("inf"), -0.0])
    wanted = _given(False, 2)
    wanted.view(-1)[3:6] = torch.tensor([float("nan"), float("inf"), -0.0])
    return torch.equal(x.full().view(torch.int64), wanted.view(torch.int64))


def test_odd_numbers_arrive_bit_by_bit() -> None:
    assert pool(2).run(_odd_numbers) == [True, True]


def _written_gradients(rank: int) -> list[bool]:
    found = []
    for ours in (True, False):
        leaf, scale = _given(ours, 2).requires_grad_(), _given(ours, 2).requires_grad_()
        x = leaf * 3
        v = x.view(-1)
        v[2:9].mul_(scale.view(-1)[2:9])
        v += 1
        y = (x.sin() * 2 + v.view(4, 6).cos()).sum()
        made = torch.autograd.grad(y, [leaf, scale])
        found += [y.item(), *(g.full() if ours else g for g in made)]
    return [abs(found[0] - found[3]) < 1e-9, *map(torch.allclose, found[1:3], found[4:])]


def test_gradients_go_through_what_was_written_into_views() -> None:
    assert pool(2).run(_written_gradients) == [[True] * 3] * 2


def _refused(rank: int) -> list[str]:
    said, x = [], _given(True, 2)
    for v in (x.long().view(-1), x.long().reshape(-1), x.view(-1).unfold(0, 2, 1)):
        try:
            v.add_(1)
        except RuntimeError as error:
            said.append(str(error))
    with torch.inference_mode():
        y = distribute(torch.ones(4, 6), Placement("cpu", range(2)), S(1))
        v = y.view(-1)
        y.add_(1)
        said.append(str(v.sum().item()))
    return said


def test_what_cannot_be_put_back_is_refused_and_inference_mode_follows_writes() -> None:
    for *said, of_inference in pool(2).run(_refused):
        assert len(said) == 3 and all("boxing had to move its data" in text for text in said)
        assert of_inference == "48.0"


def _of_plain(rank: int) -> list[bool]:
    x, like, found = torch.arange(6.0), _given(True, 2), []
    for v in (x.expand_as(like), x.repeat(4).view_as(like)):
        found.append(torch.equal(v.full(), torch.arange(6.0).expand(4, 6)))
    v = x.expand_as(like)
    x += 1
    return [*found, torch.equal(v.full(), x.expand(4, 6))]


def test_a_plain_tensor_may_be_the_source() -> None:
    assert pool(2).run(_of_plain) == [[True] * 3] * 2


def _lists(rank: int) -> list[bool]:
    x = _given(True, 2)
    v = x.view(-1)
    totals = [torch.zeros_like(v), torch.zeros_like(v)]
    torch._foreach_add_(totals, [v, v])
    x.add_(1)
    torch._foreach_add_(totals, [v, v])
    wanted = torch.arange(24.0, dtype=torch.float64) * 2 + 1
    return [torch.equal(total.full(), wanted) for total in totals]


def test_list_ops_read_moved_views() -> None:
    assert pool(2).run(_lists) == [[True, True]] * 2


def _written_lists(rank: int) -> list[str]:
    """Two views that overlap, written by each list op, one of them on ranks that do not hold it."""
    wrong, matrix = [], torch.arange(24.0, dtype=torch.float64).view(4, 6) / 30 + 0.1
    for name in (n for n in dir(torch) if n.startswith("_foreach_") and n.endswith("_")):
        found = []
        for ours in (False, True):
            x = distribute(matrix.clone(), Placement("cpu", [0, 1]), S(1)) if ours else matrix * 1
            y = distribute(matrix.clone(), Placement("cpu", [1]), S(1)) if ours else matrix * 1
            views = [x.view(-1), x[:, 4], y.view(-1)]
            others = [v.detach() + 0.5 for v in views]
            getattr(torch, name)(views, *_more(name, others))
            found.append([z.full() if ours else z for z in (x, y, *views)])
        if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(*found, strict=True)):
            wrong.append(name)
    return wrong


def _more(name: str, others: list) -> tuple:
    """The arguments of a list op that follow the list it writes into."""
    stem = name.removeprefix("_foreach_").rstrip("_")
    if stem in ("addcdiv", "addcmul"):
        return others, others
    if stem in ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "copy"):
        return (others,)
    return {"lerp": (others, 0.25), "clamp_max": (0.3,), "clamp_min": (0.3,)}.get(stem, ())


def test_what_list_ops_write_into_moved_views_is_in_their_sources() -> None:
    assert pool(2).run(_written_lists) == [[], []]


def _elsewhere(rank: int) -> list[Any]:
    here = Placement("cpu", [1, 2])
    x = distribute(torch.arange(24.0).view(4, 6), here, S(1))
    v = x.view(-1)
    x.add_(1)
    partial = distribute(torch.ones(4, 6), here, P)
    return [v.sum().item(), (v + partial.view(-1)).full().sum().item()]


def test_ranks_outside_the_placement_follow() -> None:
    assert pool(3).run(_elsewhere) == [[300.0, 324.0]] * 3


@on_ranks(2)
def test_writes_into_data_reach_views_and_a_view_keeps_its_memory(rank: int) -> None:
    """Torch counts writes into ``x.data`` apart from those into ``x``; a tensor that is given other
    memory leaves its views what they were taken from."""
    found = []
    for at in (Laid(None), Laid(Placement("cpu", [0, 1]))):
        x = at(torch.arange(8.0).view(4, 2), S(0))
        view, alias = x[1:3], x.data
        alias.mul_(2)
        x.data[1].add_(1)
        seen = [view.clone()]
        view.data.neg_()
        seen += [x.clone(), view.clone()]
        x.data = at(torch.ones(4, 2), S(0))
        x.add_(1)
        found.append([*seen, x, view])
    assert_same(found[1], found[0], rtol=0, atol=0)
