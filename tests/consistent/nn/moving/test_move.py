"""move: a job that goes to other ranks or another plan has the losses of one that stayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn.moving.carry import PendingMove
from mirrored import background
from mirrored.transports.counting import Counting, counting
from mirrored.transports.default import current, use
from mirrored.transports.ordered import Ordered
from tests.ranks import ALL, on_ranks

O = torch.optim  # noqa: E741


class Block(nn.Module):
    """x: [n, t, 8] -> [n, t, 8]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.num_heads = 2
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """ids: i64[n, t] -> logits [n, t, 11]; the head is tied to the embedding."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


BATCHES = torch.randint(0, 11, (28, 6, 7), generator=torch.Generator().manual_seed(3))
FOUR, THREE, TWO = (Placement("cpu", range(n)) for n in (4, 3, 2))
GRID = Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
LATE = Placement("cpu", [3, 1])

Where = tuple[Placement, Any]


def parallel(where: Where, dtype: torch.dtype = torch.float64, **given: Any) -> Any:
    torch.manual_seed(0)
    return consistent.parallelize(GPT(**given).to(dtype), *where)


def loss_of(model: Any, ids: torch.Tensor) -> Any:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(
    model: Any, optimizer: Any, steps: Sequence[int], moves: dict[int, Where] | None = None
) -> list[float]:
    """Losses of these steps, with a move before some of them."""
    schedule = O.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    losses = []
    for step in steps:
        if moves and step in moves:
            consistent.move(model, optimizer, *moves[step])
        optimizer.zero_grad()
        loss = loss_of(model, BATCHES[step])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def stayed(
    optimizer_of: Callable[[Any], Any], steps: Sequence[int], blocks: int = 2
) -> list[float]:
    """The losses of plain torch."""
    torch.manual_seed(0)
    model = GPT(blocks).double()
    return train(model, optimizer_of(model.parameters()), steps)


ROUTES: dict[str, tuple[Where, dict[int, Where]]] = {
    "fewer and more": (
        (FOUR, "data"),
        {1: (THREE, "zero3"), 3: (TWO, "tensor"), 5: (GRID, {"dp": "zero3", "tp": "tensor"})},
    ),
    "other ranks": (
        (TWO, "zero3"),
        {1: (LATE, "zero1"), 3: (FOUR, "zero2"), 5: (LATE, "zero3")},
    ),
    "other plans": (
        (GRID, {"dp": "zero1", "tp": "tensor"}),
        {1: (GRID, "data"), 3: (GRID, {"dp": "tensor", "tp": "zero3"}), 5: (FOUR, "zero3")},
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@on_ranks(4)
def test_next_losses_are_those_of_a_job_that_stayed(rank: int, route: str) -> None:
    start, moves = ROUTES[route]

    def optimizer_of(params: Any) -> Any:
        return O.AdamW(params, lr=0.02)

    model = parallel(start)
    # After the last move there are two losses: the second shows the first update there.
    steps = range(28 if ALL else 7)
    moved = train(model, optimizer_of(model.parameters()), steps, moves)
    assert moved == pytest.approx(stayed(optimizer_of, steps), rel=1e-12)


@on_ranks(4)
def test_dropout_draws_what_it_would_have_drawn(rank: int) -> None:
    def losses(start: Where, moves: dict[int, Where]) -> list[float]:
        model = parallel(start, blocks=1, dropout=0.2)
        return train(model, O.SGD(model.parameters(), lr=0.1), range(4), moves)

    moved = losses((TWO, "zero3"), {1: (LATE, "data"), 2: (THREE, "zero1")})
    assert moved == pytest.approx(losses((FOUR, "data"), {}), rel=1e-12)


@contextmanager
def spare_cores(enough: Callable[[list], bool]) -> Iterator[None]:
    """Ranks have cores to spare where ``enough`` says so, and have not asked each other yet."""
    before = background._spare_cores_cache, background._have_spare_cores
    background._spare_cores_cache, background._have_spare_cores = WeakKeyDictionary(), enough
    try:
        with use(Counting(current())):
            yield
    finally:
        background._spare_cores_cache, background._have_spare_cores = before


@on_ranks(4)
def test_there_and_back_where_only_some_ranks_gather_ahead(rank: int) -> None:
    """Ranks that have a core to spare as long as they are two gather in the background then, and
    so their transport is another one than before. They remember what they asked the others."""

    def losses(moves: dict[int, Where]) -> list[float]:
        model = parallel((FOUR, "zero3"))
        return train(model, O.AdamW(model.parameters(), lr=0.02), range(6), moves)

    with spare_cores(lambda uses: len(uses) == 2):
        moved = losses({2: (TWO, "zero3"), 4: (FOUR, "zero3")})
        assert isinstance(current(), Ordered) == (rank < 2)
    wanted = stayed(lambda params: O.AdamW(params, lr=0.02), range(6))
    assert moved == pytest.approx(wanted, rel=1e-12)


@on_ranks(4)
def test_nothing_is_sent_once_the_tensors_are_laid_anew(rank: int) -> None:
    """What ranks ask of each other for the new plan's hooks, they ask before."""
    put, sent = PendingMove.commit, list[int]()

    def noted_put(self: PendingMove) -> None:
        put(self)
        sent.append(len(log.calls))

    model = parallel((LATE, "data"))
    PendingMove.commit = noted_put  # type: ignore[method-assign]
    try:
        with spare_cores(lambda uses: True), counting() as log:
            consistent.move(model, None, THREE, "zero3")
            assert isinstance(current(), Ordered) == (rank < 3)
    finally:
        PendingMove.commit = put  # type: ignore[method-assign]
    assert sent == [len(log.calls)]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW fused": lambda p: O.AdamW(p, lr=0.02, fused=True),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.02),
    "Adafactor": lambda p: O.Adafactor(p, lr=0.02),
    "two groups": lambda p: O.AdamW(
        [{"params": list(p)[:5]}, {"params": list(p)[5:], "lr": 0.1}], lr=torch.tensor(0.02)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_state_of_any_optimizer_moves(rank: int, name: str) -> None:
    def optimizer_of(params: Any) -> Any:
        return OPTIMIZERS[name](list(params))

    model = parallel((TWO, "zero1"), blocks=1)
    moves = {1: (THREE, "zero3"), 3: (LATE, "data")}
    moved = train(model, optimizer_of(model.parameters()), range(5), moves)
    assert moved == pytest.approx(stayed(optimizer_of, range(5), blocks=1), rel=1e-12)


@on_ranks(4)
def test_master_weights_move(rank: int) -> None:
    def losses(start: Where, moves: dict[int, Where]) -> tuple[list[float], Any]:
        model = parallel(start, torch.bfloat16, blocks=1)
        optimizer = consistent.master_weights(O.AdamW(model.parameters(), lr=0.02))
        train(model, optimizer, range(2))
        if moves:
            consistent.move(model, optimizer, *moves[2])
        copies = [x["master"].full() for x in optimizer.state_dict()["state"].values()]
        return train(model, optimizer, range(2, 5)), copies

    # The same plan on the same number of ranks rounds sums in the same way.
    (moved, copies), (wanted, before) = (
        losses((TWO, "zero1"), {2: (LATE, "zero1")}),
        losses((TWO, "zero1"), {}),
    )
    assert moved == wanted
    assert all(torch.equal(a, b) for a, b in zip(copies, before, strict=True))
    assert len(copies) == len(before) > 10


@on_ranks(4)
def test_gradients_that_were_accumulated_before_are_kept(rank: int) -> None:
    def grads(start: Where, move_to: Where, later: Where) -> list[torch.Tensor]:
        model = parallel(start, blocks=1)
        with consistent.no_sync():
            loss_of(model, BATCHES[0]).backward()  # its gradients are addends
        kept = model.norm.weight.grad
        consistent.move(model, None, *move_to)
        assert model.norm.weight.grad is kept and not any(e.is_partial for e in kept.sbp)
        loss_of(model, BATCHES[1]).backward()
        consistent.move(model, None, *later)
        loss_of(model, BATCHES[2]).backward()
        return [p.grad.full() for p in model.parameters()]

    torch.manual_seed(0)
    plain: Any = GPT(blocks=1).double()
    for batch in BATCHES[:3]:
        loss_of(plain, batch).backward()
    wanted = [p.grad for p in plain.parameters()]
    for start, first, then in (
        ((FOUR, "data"), (THREE, "zero3"), (GRID, {"dp": "zero2", "tp": "tensor"})),
        ((LATE, "zero3"), (TWO, "data"), (FOUR, "zero2")),
    ):
        for given, x in zip(grads(start, first, then), wanted, strict=True):
            torch.testing.assert_close(given, x, rtol=1e-12, atol=1e-13)


def lacking(src: Any, dst: Any, ranks: int) -> int:
    """Bytes that ranks need under ``dst`` and do not hold under ``src``, by marking elements."""
    found = 0
    for rank in range(ranks):
        at, to = src.placement.coordinate_of(rank), dst.placement.coordinate_of(rank)
        marks = torch.zeros(tuple(src.shape), dtype=torch.bool)
        for spec, where, mark in ((dst, to, True), (src, at, False)):
            if where is not None:
                starts, sizes = spec.region(where)
                box = tuple(slice(a, a + n) for a, n in zip(starts, sizes))
                marks[box] = mark
        found += int(marks.sum()) * src.dtype.itemsize
    return found


@pytest.mark.parametrize("route", ROUTES)
@on_ranks(4)
def test_no_more_bytes_are_sent_than_ranks_lack(rank: int, route: str) -> None:
    where, moves = ROUTES[route]
    model = parallel(where)
    optimizer = O.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(1))

    def tensors() -> list[Any]:
        params = list(model.parameters())
        states = [x for p in params for x in optimizer.state[p].values()]
        held = [*params, *model.buffers(), *(p.grad for p in params), *states]
        return [x for x in held if isinstance(x, consistent.GlobalTensor)]

    for target in moves.values():
        before = [x._spec for x in tensors()]
        with counting() as log:
            consistent.move(model, optimizer, *target)
        least = sum(lacking(a, x._spec, 4) for a, x in zip(before, tensors(), strict=True))
        mine = sum(call.bytes for call in log.calls if call.name != "gather_objects")
        assert sum(log.inner.gather_objects(mine, (0, 1, 2, 3))) == least
        assert set(log.names) <= {"gather_objects", "exchange"}
        assert log.names.count("exchange") <= 1  # all tensors go in one message


@on_ranks(4)
def test_objects_stay_and_hooks_of_the_old_plan_go(rank: int) -> None:
    model = parallel((FOUR, "zero3"))
    seen: list[str] = []
    model.token.weight.register_hook(lambda grad: seen.append("hook"))
    model.token.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    model.norm.register_forward_hook(lambda *given: seen.append("forward"))
    optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(1))
    objects = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    state = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert consistent.move(model, optimizer, TWO, "data") is model
    now = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(a is b for a, b in zip(objects, now, strict=True))
    assert all(x.placement == TWO and x.sbp == (B,) for x in [*objects, *state])
    assert model.head.weight is model.token.weight
    assert str(consistent.plan_of(model)) == str(consistent.plan_of(parallel((TWO, "data"))))
    assert not model.blocks._forward_pre_hooks and not model.blocks._forward_hooks
    assert not any("_call_impl" in m.__dict__ for m in model.modules())
    seen.clear()
    with counting() as log:
        loss_of(model, BATCHES[1]).backward()
    assert sorted(seen) == ["after", "forward", "hook"]
    assert "all_gather" not in log.names


class Noted(nn.Module):
    """It holds a plain tensor, which ranks outside its placement may not have."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.scale = torch.tensor([1.0 + rank], dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@on_ranks(4)
def test_ranks_that_come_in_get_plain_tensors(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = consistent.parallelize(Noted(rank), Placement("cpu", [1]), inputs=B)
    wanted = model(torch.ones(3, 4, dtype=torch.float64)).full()
    consistent.move(model, None, Placement("cpu", [0, 2]))
    assert model.scale.item() == 2
    assert torch.equal(model(torch.ones(3, 4, dtype=torch.float64)).full(), wanted)


@on_ranks(4)
def test_each_rank_passes_its_part_of_a_batch_after_a_move_too(rank: int) -> None:
    torch.manual_seed(0)
    model = consistent.parallelize(nn.Linear(4, 2), Placement("cpu", [0, 1]), inputs=S(0))
    consistent.move(model, None, Placement("cpu", range(3)), "zero3")
    assert model(torch.ones(2, 4)).shape == (6, 2)
    grid = Placement("cpu", [[0], [1]], axes=("dp", "tp"))
    with pytest.raises(ValueError, match="say inputs= for the new one"):
        consistent.move(model, None, grid, {"dp": "zero3"})
    consistent.move(model, None, grid, {"dp": "zero3"}, inputs={"dp": S(0)})
    assert model(torch.ones(2, 4)).shape == (4, 2)


@on_ranks(4)
def test_a_loader_goes_on_where_the_one_before_was(rank: int) -> None:
    def items(first: Placement, then: Placement | None) -> list[float]:
        found = []
        loader = consistent.data.loader(torch.arange(20.0), first, batch_size=4, shuffle=True)
        for batch in loader:
            found += batch.tolist()
            if then and len(found) == 8:
                break
        if then:
            position = loader.state_dict()
            loader = consistent.data.loader(torch.arange(20.0), then, batch_size=4, shuffle=True)
            loader.load_state_dict(position)
            found += [x for batch in loader for x in batch.tolist()]
        return found

    two, three = (Placement("cpu", range(n)) for n in (2, 3))
    assert items(two, three) == items(two, None)


@on_ranks(4)
def test_some_ranks_keep_their_shards_of_a_dim_that_is_cut(rank: int) -> None:
    line, wanted = Placement.all("cpu"), torch.arange(48.0).view(12, 4)
    cuts = [
        S(0, sizes=(12, 0, 0, 0)),
        S(0, sizes=(0, 12, 0, 0)),
        S(0, sizes=(6, 6, 0, 0)),
        S(0, blocks=3),
    ]
    cuts += [S(0, cut="zigzag"), S(0, sizes=(4, 2, 6, 0)), S(0), B]
    model: Any = nn.Linear(4, 12, bias=False)
    consistent.parallelize(model, line, {"weight": cuts[-1]})
    with torch.no_grad():
        model.weight.copy_(wanted)
    for sbp in (*cuts, *reversed(cuts), *cuts[::3]):
        consistent.move(model, None, line, {"weight": sbp})
        assert model.weight.sbp == (sbp,)
        assert torch.equal(model.weight.full(), wanted), sbp
