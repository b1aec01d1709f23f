"""zero3: parameters lie as S and are gathered where they are used; a module trains as it does
alone, however it is called."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import B, GlobalTensor, P, Placement, S
from consistent.dispatch.plans.shards import plain
from consistent.nn import Layouts, Plan
from consistent.nn.sharded.saved import SavedShards
from mirrored.transports.counting import counting
from tests.ranks import ON_ONE_AXIS, SIZES, in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn

ZERO3 = Layouts((S(0),), use=(B,))
# Each module gathers its own parameters, and once more in backward, however small they are.
ONE_BY_ONE = Plan({"*": ZERO3}, keep_bytes=0)
KEEPS = [1]  # whether small ones are gathered together and kept; the last one counts
TWO_AXES = Plan(
    {
        "*.up.weight": Layouts((S(1), S(0)), use=(B, S(0))),
        "*.up.bias": Layouts((B, S(0))),
        "*.down.weight": Layouts((S(0), S(1)), use=(B, S(1))),
        "*": Layouts((S(0), B), use=(B, B)),
    }
)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a block that runs twice, a parameter of its own, and one that is frozen."""

    wrap: Callable[..., Any] | None = None  # what calls the blocks

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, dim)
        self.position = nn.Parameter(torch.randn(4, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.mix = nn.Linear(dim, dim).requires_grad_(False)
        self.head = nn.Linear(dim, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        return self.head(self.mix(x))


IDS = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 0], [0, 1, 2, 3], [3, 3, 5, 6], [6, 5, 4, 3]])


def net(at: Laid, cls: type = Net, plan: Any = None) -> Any:
    torch.manual_seed(0)
    model = cls().double()
    if at.placement is None:
        return model
    plan = plan or (TWO_AXES if at.placement.ndim == 2 else {1: "zero3", 0: ONE_BY_ONE}[KEEPS[-1]])
    return consistent.parallelize(model, at.placement, plan)


def both_ways(rank: int, case: Callable[..., Any], ranks: Any, *args: Any) -> None:
    """Where small parameters are gathered together, and where each module gathers its own; on two
    axes there is one plan."""
    for keeps in (0,) if Placement("cpu", ranks).ndim == 2 else (0, 1):
        KEEPS.append(keeps)
        try:
            compare(rank, case, ranks, *args)
        finally:
            KEEPS.pop()


def loss_of(at: Laid, model: Any) -> Any:
    return F.cross_entropy(model(at(IDS, S(0))).flatten(0, 1), at(IDS.flip(1), S(0)).flatten())


def result(model: Any, *more: Any) -> Any:
    assert not any(name in module.__dict__ for module in model.modules()
                   for name in module._parameters)  # fmt: skip
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    return [p.grad for p in model.parameters()], dict(model.state_dict()), more


def trained(at: Laid, wrap: Any = None) -> Any:
    model = net(at)
    model.wrap = wrap
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                losses.append(loss_of(at, model))
        loss = loss_of(at, model)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return result(model, losses)


def by_checkpoint(block: Any, x: Any) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def by_reentrant_checkpoint(block: Any, x: Any) -> Any:
    return checkpoint(block, x, use_reentrant=True)


def on_the_cpu(block: Any, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


WRAPS = {
    "called": None,
    "checkpoint": by_checkpoint,
    "reentrant": by_reentrant_checkpoint,
    "save_on_cpu": on_the_cpu,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_module_trains_as_it_does_alone(wrap: str) -> None:
    for world in in_turn(list(WRAPS).index(wrap)) if wrap != "called" else SIZES:
        pool(world).run(both_ways, trained, GRIDS[world], WRAPS[wrap])


def accumulated(at: Laid) -> Any:
    model = net(at)
    with consistent.no_sync():
        loss_of(at, model).backward()
    loss_of(at, model).backward()
    return result(model)


def accumulated_on_a_sum(at: Laid) -> Any:
    """Between synchronised ones, with the gradient read, and asked for without accumulation."""
    model = net(at)
    loss_of(at, model).backward()
    with consistent.no_sync():
        loss_of(at, model).backward()
        loss_of(at, model).backward()
        between = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss_of(at, model), [model.position])
    loss_of(at, model).backward()
    loss_of(at, model).backward()
    return result(model, between, found)


def accumulated_and_left(at: Laid) -> Any:
    model = net(at)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        with consistent.no_sync():
            loss_of(at, model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return result(model)


def twice_through_one_graph(at: Laid) -> Any:
    model = net(at)
    loss = loss_of(at, model)
    loss.backward(retain_graph=True)
    loss.backward()
    return result(model)


def gradients_of_gradients(at: Laid) -> Any:
    model = net(at)
    trains = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss_of(at, model), trains, create_graph=True)
    sum(g.square().sum() for g in grads).backward()
    return result(model)


def under_autocast(at: Laid) -> Any:
    model = net(at).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(at, model)
    loss.backward()
    return [p.grad.dtype for p in model.parameters() if p.requires_grad], float(loss) < 4


def without_gradients(at: Laid) -> Any:
    model = net(at).eval()
    with torch.no_grad():
        first = model(at(IDS, S(0)))
    with torch.inference_mode():
        second = model(at(IDS, S(0)))
    return result(model, first, second.clone())


def with_hooks(at: Laid) -> Any:
    model, seen = net(at), []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    block.register_forward_hook(lambda module, args, out: seen.append(module.up.weight.sum()))
    block.register_full_backward_hook(lambda module, gi, go: seen.append(go[0].sum()))
    model.blocks[1].up.register_full_backward_pre_hook(lambda module, go: (go[0] * 3,))
    loss_of(at, model).backward()
    return result(model, seen)


def part_of_the_gradients(at: Laid) -> Any:
    model = net(at)
    loss = loss_of(at, model)
    found = torch.autograd.grad(loss, [model.position], retain_graph=True)
    loss.backward(inputs=[model.blocks[1].up.weight])
    return result(model, found)


def copied(at: Laid) -> Any:
    model = net(at)
    other, block = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
    with torch.no_grad():
        other.head.weight.mul_(2)
    assert other.head.weight is other.embed.weight
    loss_of(at, other).backward()
    y = block(at(randn(3, 5), S(0)))
    return result(other, [p.grad for p in model.parameters()], y, loss_of(at, model))


def after_an_exception(at: Laid) -> Any:
    model, faults = net(at), [True]

    def fail(module: Any, args: Any) -> None:
        if faults.pop() if faults else False:
            raise ValueError("once")

    model.blocks[1].down.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="once"):
        model(at(IDS, S(0)))
    result(model)
    loss_of(at, model).backward()
    return result(model)


class Stop(BaseException):
    """What Ctrl-C raises is no Exception either."""


def after_ctrl_c(at: Laid) -> Any:
    model = net(at)
    places = [model.blocks[1].down, model.blocks[0].norm, model]
    for place in places:
        for register in (place.register_forward_pre_hook, place.register_forward_hook):
            handle = register(_stop)
            with pytest.raises(Stop):
                model(at(IDS, S(0)))
            handle.remove()
            result(model)
    loss_of(at, model).backward()
    return result(model)


def _stop(*args: Any) -> None:
    raise Stop


def converted(at: Laid) -> Any:
    model = net(at).float().double()
    model.requires_grad_(True)
    loss_of(at, model).backward()
    model.zero_grad(set_to_none=False)
    loss_of(at, model).backward()
    return result(model)


def stepping_within_backward(at: Laid) -> Any:
    model = net(at)
    for p in model.parameters():
        if p.requires_grad:
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss_of(at, model).backward()
    return result(model)


SITUATIONS = [
    accumulated,
    accumulated_on_a_sum,
    accumulated_and_left,
    twice_through_one_graph,
    gradients_of_gradients,
    under_autocast,
    without_gradients,
    with_hooks,
    part_of_the_gradients,
    copied,
    after_an_exception,
    after_ctrl_c,
    converted,
    stepping_within_backward,
]


@pytest.mark.parametrize("case", SITUATIONS)
def test_in_every_situation(case: Callable[..., Any]) -> None:
    for world in in_turn(SITUATIONS.index(case)):
        pool(world).run(both_ways, case, GRIDS[world])


# -- modules that read their parameters in other ways ----------------------------------------------


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, max_norm=0.9)
        self.attend = nn.MultiheadAttention(5, 1, batch_first=True)
        self.recur = nn.LSTM(5, 4, num_layers=2, batch_first=True)
        self.list = nn.ParameterList(torch.randn(4, 4) for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.clamped = nn.Parameter(torch.randn(4, 7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.recur(self.attend(x, x, x, need_weights=False)[0])[0]
        for weight in self.list:
            x = x @ weight
        self.clamped.data.clamp_(-0.5, 0.5)
        return self.normed(x) @ self.clamped


def other_ways(at: Laid) -> Any:
    model = net(at, Others, "zero3" if at.placement is None or at.placement.ndim == 1 else PAIRS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(at, model).backward()
        optimizer.step()
    return result(model)


PAIRS = {"0": "zero3", "1": "data"}


@pytest.mark.parametrize("world", SIZES)
def test_modules_that_write_into_parameters_or_read_those_of_others(world: int) -> None:
    pool(world).run(compare, other_ways, GRIDS[world])


# -- what torch refuses ----------------------------------------------------------------------------


def _written_between(at: Laid, what: str) -> Any:
    model = net(at)
    loss = loss_of(at, model)
    with torch.no_grad():
        if what == "parameter":
            model.blocks[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Writes(nn.Module):
    """Writes into an activation that autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.weight).exp()
        y.mul_(2)
        return y


def _written_inside(at: Laid) -> Any:
    model = net(at, Writes)
    loss = model(at(randn(3, 5), S(0))).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_saved_tensor_that_was_written_to_raises_as_in_torch() -> None:
    for case in (lambda at: _written_between(at, "parameter"), _written_inside):
        case(Laid(None))
    pool(2).run(_refused)


def _refused(rank: int) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    _written_between(at, "parameter")
    _written_inside(at)


# -- where parameters lie, and what is sent --------------------------------------------------------


@on_ranks(2)
def test_only_forward_sees_gathered_parameters(rank: int) -> None:
    model, seen = net(Laid(Placement("cpu", [0, 1]))), {}
    up = model.blocks[0].up

    def look(module: Any, args: Any) -> None:
        seen["forward"] = module.weight.sbp
        seen["named"] = dict(module.named_parameters())["weight"].sbp
        seen["state"] = model.state_dict()["blocks.0.up.weight"].sbp

    up.register_forward_pre_hook(look)
    ids = consistent.distribute(IDS, Placement("cpu", [0, 1]), S(0))
    model(ids).sum().backward()
    assert seen == {"forward": (B,), "named": (S(0),), "state": (S(0),)}
    assert up.weight.sbp == up.weight.grad.sbp == (S(0),)
    assert isinstance(up.weight, nn.Parameter) and isinstance(up.weight, GlobalTensor)


@on_ranks(2)
def test_it_is_gathered_twice_and_reduced_once(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
                                   placement, ONE_BY_ONE)  # fmt: skip
    x = consistent.from_local(torch.randn(3, 8), placement, S(0)).requires_grad_()
    with counting() as sent:
        y = model(x)
    weights, biases = 2 * 8 * 8 * 4 // 2, 2 * 8 * 4 // 2
    assert sent.bytes == weights + biases
    with counting() as sent:
        y.sum().backward()
    # A gather of the weights again, and a reduce-scatter of all gradients. Biases are not needed.
    assert sent.bytes == weights + weights + biases
    y = model(x)
    with counting() as sent:
        y.sum().backward()
    # Backward begins with the last weight, which is kept for it from now on.
    assert sent.bytes == weights // 2 + weights + biases


@on_ranks(2)
def test_a_module_gathers_and_reduces_in_one_message(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
                                   placement, ONE_BY_ONE)  # fmt: skip
    x = consistent.from_local(torch.randn(3, 8), placement, S(0))
    with counting() as sent:
        y = model(x)
    assert sent.names == ["all_gather"] * 2
    with counting() as sent:
        y.sum().backward()
    # The first weight's values are not needed in backward, since x asks for no gradient.
    assert sorted(sent.names) == ["all_gather", "all_to_all", "all_to_all"]


@on_ranks(2)
def test_small_parameters_are_gathered_together_and_kept(rank: int) -> None:
    """One gather and one reduce-scatter a step; module by module under hooks for saved tensors, and
    while a call that has kept them waits for its backward."""
    placement = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
                                   placement, "zero3")  # fmt: skip
    x = consistent.from_local(torch.randn(3, 8), placement, S(0)).requires_grad_()

    def names(*calls: Callable[[], Any]) -> list[str]:
        with counting() as sent:
            for call in calls:
                call()
        return sent.names

    def step() -> None:
        model(x).sum().backward()

    together = ["all_gather", "all_to_all"]
    with torch.no_grad():
        assert names(lambda: model(x), lambda: model(x)) == ["all_gather"] * 2
    assert names(step, step) == together * 2
    kept = model(x).sum()
    assert names(lambda: model(x)) == ["all_gather"] * 2
    assert names(kept.backward, step) == ["all_to_all", *together]
    model(x)  # of which no backward comes
    assert len(names(step)) > 2
    assert names(step) == together
    with torch.autograd.graph.save_on_cpu():
        assert names(lambda: model(x)) == ["all_gather"] * 2
    assert names(step) == together


def calls_of_every_kind(at: Laid) -> Any:
    """A module that calls itself, one that is called by itself, and a loop over calls."""
    model = net(at, Recursive)
    x = at(randn(6, 5), S(0))
    alone = model.norm(x).sum()
    many = [model(x * k, depth=k).sum() for k in range(3)]
    (alone + sum(many)).backward()
    with torch.no_grad():
        more = model(x, depth=2), model.norm(x), model(x, depth=1, inside=True)
    return result(model, alone, many, more)


class Recursive(Block):
    def __init__(self) -> None:
        super().__init__(5)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, depth: int = 0, inside: bool = False) -> torch.Tensor:
        if inside:  # gradients that the caller has switched off
            with torch.enable_grad():
                super().forward(x).add(self.up.weight.sum()).square().sum().backward()
        x = super().forward(x) * self.scale
        return self(x, depth - 1) + self.scale if depth else x


@pytest.mark.parametrize("world", ON_ONE_AXIS)
def test_calls_of_every_kind(world: int) -> None:
    pool(world).run(both_ways, calls_of_every_kind, range(world))


@on_ranks(2)
def test_inside_no_sync_gradients_are_not_reduced(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Linear(8, 8), placement, ONE_BY_ONE)
    x = consistent.from_local(torch.randn(3, 8), placement, S(0))
    for _ in range(2):
        with consistent.no_sync(), counting() as sent:
            y = model(x).sum()
            sent.clear()
            y.backward()
        assert sent.names == [] and model.weight.grad.sbp == (P,)
    y = model(x).sum()
    with counting() as sent:
        y.backward()
    assert sent.names == ["all_to_all"] and model.weight.grad.sbp == (S(0),)


@on_ranks(2)
def test_nothing_gathered_outlives_forward_and_backward(rank: int) -> None:
    placement, kept = Placement("cpu", [0, 1]), []
    model = consistent.parallelize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
                                   placement, ONE_BY_ONE)  # fmt: skip

    def keep(module: Any, args: Any) -> None:
        kept.append(StorageWeakRef(plain(module.weight).untyped_storage()))

    for layer in model:
        layer.register_forward_pre_hook(keep)
    y = model(consistent.from_local(torch.randn(3, 64), placement, S(0)))
    assert y.requires_grad and len(kept) == 2 and all(each.expired() for each in kept)


@on_ranks(2)
def test_copies_that_autocast_makes_do_not_outlive_forward(rank: int) -> None:
    placement, kept = Placement("cpu", [0, 1]), []
    model = consistent.parallelize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
                                   placement, ONE_BY_ONE)  # fmt: skip
    pack = SavedShards.pack

    def watched(self: SavedShards, x: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if x.dtype is torch.bfloat16 and x.numel() == 64 * 64:
                kept.append(StorageWeakRef(x.untyped_storage()))
        return pack(self, x)

    x = consistent.from_local(torch.randn(3, 64), placement, S(0)).requires_grad_()
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(SavedShards, "pack", watched)
        y = model(x)
    assert y.requires_grad and len(kept) == 2 and all(each.expired() for each in kept)
    y.sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def gradients_under_autocast(at: Laid) -> Any:
    up = net(at).float().blocks[0].up
    with torch.no_grad():
        for p in up.parameters():  # numbers whose sums bfloat16 has
            p.copy_((p * 8).round() / 8)
    x = at.leaf((randn(6, 5).float() * 4).round() / 4, S(0))
    with torch.autocast("cpu", torch.bfloat16):
        y = up(x)
    y.float().sum().backward()
    return y, x.grad, [p.grad for p in up.parameters()]


@pytest.mark.parametrize("world", SIZES)
def test_gradients_under_autocast(world: int) -> None:
    pool(world).run(compare, gradients_under_autocast, GRIDS[world])


@on_ranks(2)
def test_hooks_of_one_level_are_shared(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model, tops = net(Laid(placement), Net, ONE_BY_ONE), []

    def look(module: Any, args: Any) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        tops.append(top[0].__self__)

    model.register_forward_pre_hook(look)
    model.blocks[0].up.register_forward_pre_hook(look)
    model(consistent.distribute(IDS, placement, S(0)))
    assert isinstance(tops[0], SavedShards) and tops[0] is tops[1] is tops[2]


def saved_and_loaded(rank: int) -> None:
    """A module is, by ``torch.save``, and gives the same again and again."""
    placement = Placement("cpu", [0, 1])
    ids = consistent.distribute(IDS, placement, S(0))
    for plan in ("zero3", ONE_BY_ONE):
        model, file = net(Laid(placement), Net, plan), io.BytesIO()
        model(ids)  # the order of its parameters is known
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for _ in range(3):
            loaded(ids).sum().backward()
            model(ids).sum().backward()
        of_both = [[p.grad.full() for p in m.parameters() if p.requires_grad]
                   for m in (model, loaded)]  # fmt: skip
        assert_same(of_both[1], of_both[0])


def test_a_parallelized_module_is_saved_and_loaded_whole() -> None:
    pool(2).run(saved_and_loaded)
