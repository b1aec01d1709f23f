"""Programs over several placements: pipelines, mixed parallelism, what stands around training."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, GlobalTensor, P, Placement, S, placement_scope
from tests.ranks import ALL, on_ranks, pool
from tests.twins import assert_same, randn

# Stages of a pipeline, and the plan of the parameters in each.
PIPELINES: dict[str, tuple[int, list[tuple[Any, dict]]]] = {
    "two": (2, [([0], {}), ([1], {})]),
    "four": (4, [([0], {}), ([1], {}), ([2], {}), ([3], {})]),
    "back and forth": (
        3,
        [([0], {}), ([2], {}), ([0, 1], {"*weight": S(0), "*bias": S(0)}), ([0], {})],
    ),
    "data then tensor parallel": (4, [([0, 1], {}), ([2, 3], {"*weight": S(0), "*bias": S(0)})]),
    "grids": (4, [([[0, 1], [2, 3]], {"0.weight": (B, S(1))}), ([3, 1], {}), ([2], {})]),
}


class Stages(nn.Module):
    """Blocks that lie on their own placements; an activation moves to where the next block lies."""

    def __init__(self, count: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(count)
        )
        self.double()

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            w = block[0].weight
            if isinstance(w, GlobalTensor):
                x = x.to_global(placement=w.placement, sbp=(S(0), *[B] * (w.placement.ndim - 1)))
            x = block(x)
        return x


def staged(stages: list[tuple[Any, dict]], dropout: float = 0.0) -> Stages:
    net = Stages(len(stages), dropout)
    for block, (ranks, plan) in zip(net.blocks, stages, strict=True):
        where = Placement("cpu", ranks)
        consistent.parallelize(block, where, plan)
    return net


def batch(net: Any, step: int) -> tuple[Any, Any]:
    x, y = randn(7, 6, seed=step), randn(7, 6, seed=step + 1000)
    first, last = net.blocks[0][0].weight, net.blocks[-1][0].weight
    if not isinstance(first, GlobalTensor):
        return x, y
    return (
        consistent.distribute(x, first.placement, (B,) * first.placement.ndim),
        consistent.distribute(y, last.placement, (B,) * last.placement.ndim),
    )


def train(
    net: Any, steps: int, make: Callable[..., torch.optim.Optimizer], clip: float = 0.0
) -> list[float]:
    optimizer = make(net.parameters())
    losses = []
    for step in range(steps):
        x, y = batch(net, step)
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, **options)


def many_steps(rank: int, stages: list, steps: int) -> None:
    plain, ours = Stages(len(stages)), staged(stages)
    wanted = train(plain, steps, adamw)
    assert len(set(wanted)) == steps
    assert_same(train(ours, steps, adamw), wanted)
    assert_same(dict(ours.named_parameters()), dict(plain.named_parameters()))
    assert_same(
        {n: p.grad for n, p in ours.named_parameters()},
        {n: p.grad for n, p in plain.named_parameters()},
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_many_steps_equal_one_process(name):
    world, stages = PIPELINES[name]
    pool(world).run(many_steps, stages, 50 if ALL else 5)


# -- what stands around training -------------------------------------------------------------------

STAGES = [([0], {}), ([2, 1], {"0.weight": S(0), "0.bias": S(0)}), ([1], {})]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **k: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **k
    ),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=0.02, amsgrad=True, weight_decay=0.1, **k),
    "adamw": adamw,
    "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.02, **k),
}
KINDS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(3)
def test_optimizers_and_clipping(rank: int, name: str) -> None:
    """Each optimizer in each kind, and each of the two with clipping and without."""
    number = list(OPTIMIZERS).index(name)
    for turn, kind in enumerate(KINDS.values(), start=number):
        make: Any = functools.partial(OPTIMIZERS[name], **kind)
        for clip in (0.0, 0.05) if ALL else ((0.0, 0.05)[turn % 2],):
            plain, ours = Stages(3), staged(STAGES)
            wanted = train(plain, 3, make, clip)
            where = f"{name} {kind} clipped to {clip}"
            assert_same(train(ours, 3, make, clip), wanted, where)
            assert_same(dict(ours.named_parameters()), dict(plain.named_parameters()), where)


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True])
@on_ranks(3)
def test_clipping_by_the_norm_of_all_placements(
    rank: int, norm: float, foreach: bool | None
) -> None:
    plain, ours = Stages(3), staged(STAGES)
    totals = []
    for net in (plain, ours):
        x, y = batch(net, 0)
        (net(x) - y).square().sum().backward()
        totals.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm, foreach=foreach))
    # Alike on every rank, and of no placement, so that it goes with gradients on any.
    assert type(totals[1]) is torch.Tensor
    assert_same(totals[1], totals[0])
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@on_ranks(3)
def test_state_dicts_and_copies(rank: int) -> None:
    ours, other = staged(STAGES), staged(STAGES)
    optimizer = adamw(ours.parameters())
    before = train(ours, 3, lambda _: optimizer)
    file = io.BytesIO()
    torch.save({"net": ours.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state["net"])
    resumed = adamw(other.parameters())
    resumed.load_state_dict(state["optimizer"])
    twin = copy.deepcopy(ours)
    assert_same([p.full() for p in twin.parameters()], [p.full() for p in ours.parameters()])
    assert [p.placement for p in twin.parameters()] == [p.placement for p in ours.parameters()]
    after = train(ours, 3, lambda _: optimizer)
    assert after != before
    assert_same(train(other, 3, lambda _: resumed), after)


@on_ranks(3)
def test_gradients_add_up_over_micro_batches(rank: int) -> None:
    plain, ours = Stages(3), staged(STAGES)
    for net in (plain, ours):
        for step in range(3):
            x, y = batch(net, step)
            if net is ours and step < 2:
                with consistent.no_sync():
                    (net(x) - y).square().mean().backward()
            else:
                (net(x) - y).square().mean().backward()
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@on_ranks(3)
def test_random_numbers_do_not_depend_on_placements(rank: int) -> None:
    losses = []
    for stages in (STAGES, [([0, 1, 2], {})] * 3):
        torch.manual_seed(5)
        losses.append(train(staged(stages, dropout=0.3), 4, adamw))
    assert_same(*losses)


@on_ranks(3)
def test_activation_checkpoint_over_stages(rank: int) -> None:
    nets = [staged(STAGES), staged(STAGES)]
    for net, recompute in zip(nets, (False, True), strict=True):
        x, y = batch(net, 0)
        run = torch.utils.checkpoint.checkpoint if recompute else lambda f, x, **_: f(x)
        (run(net, x, use_reentrant=False) - y).square().mean().backward()
    assert_same(*([p.grad.full() for p in net.parameters()] for net in nets))


@on_ranks(3)
def test_gradient_of_a_gradient_through_a_move(rank: int) -> None:
    """A gradient penalty through a move: gradients of gradients."""
    found = []
    for ours in (False, True):
        x, w = randn(5, 6), randn(6, 6, seed=1)
        if ours:
            x = consistent.distribute(x, Placement("cpu", [0, 1]), S(0))
            w = consistent.distribute(w, Placement("cpu", [1, 2]), S(1))
        x.requires_grad_(), w.requires_grad_()
        moved = x.to_global(placement=w.placement, sbp=B) if ours else x * 1
        y = (moved @ w).tanh()
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        g.square().sum().backward()
        found.append((g, x.grad, w.grad))
    assert_same(found[1], found[0])


# -- one tensor ------------------------------------------------------------------------------------


@on_ranks(3)
def test_values_are_read_on_every_rank(rank: int) -> None:
    full = randn(5, 4)
    x = consistent.distribute(full, Placement("cpu", [2, 0]), S(0))
    assert torch.equal(x.full(), full) and x.tolist() == full.tolist() and x.shape == (5, 4)
    assert x.sum().item() == pytest.approx(full.sum().item()) and bool(x[0, 0] == full[0, 0])
    assert x.device.type == "cpu" and not x.is_meta
    assert repr(x.sum()).startswith("tensor(") and "ranks=[2, 0]" in repr(x)
    assert x.to_local().numel() == {0: 8, 1: 0, 2: 12}[rank]
    y = x.to_global(placement=Placement("cpu", [1]))
    assert (
        y.sbp == (S(0),) and torch.equal(y.full(), full) and x.to_global(placement=x.placement) is x
    )


@on_ranks(3)
def test_gradient_stops_over_on_the_target(rank: int) -> None:
    x = consistent.distribute(randn(5, 4), Placement("cpu", [0, 1]), S(0)).requires_grad_()
    with consistent.report() as seen:
        y = x.to_global(placement=Placement("cpu", [1, 2]), sbp=B, grad_sbp=S(1))
        y.square().sum().backward()
    assert_same(x.grad, 2 * randn(5, 4))
    there, over, back = (move for move in seen.boxings() if "keep_first" not in move)
    assert there == "S(0) -exchange(0, 1 to 1, 2)-> B"
    assert over == "P -reduce_scatter(0)-> S(1)"
    assert back == "S(1) -exchange(1, 2 to 0, 1)-> S(0)"


@on_ranks(3)
def test_a_pipeline_passes_check_mode(rank: int) -> None:
    net = staged(STAGES)
    with consistent.check_mode():
        wanted = train(net, 2, adamw, 0.1)
    assert_same(train(staged(STAGES), 2, adamw, 0.1), wanted)


@on_ranks(2)
def test_plain_tensors_go_with_any_placement(rank: int) -> None:
    x = consistent.distribute(randn(5, 4), Placement("cpu", [1]), B).requires_grad_()
    w = randn(5, 4, seed=1).requires_grad_()
    y = torch.where(torch.arange(4) < 2, x * w, x + torch.ones(4, dtype=torch.float64))
    y.sum().backward()
    assert y.placement == x.placement
    wanted = torch.where(
        torch.arange(4) < 2, randn(5, 4, seed=1), torch.ones(4, dtype=torch.float64)
    )
    assert_same(x.grad, wanted)


def mixed(rank: int) -> None:
    x = consistent.ones(4, 4, placement=Placement("cpu", [0]), sbp=B)
    y = consistent.ones(4, 4, placement=Placement("cpu", [1]), sbp=B)
    for op in (
        torch.add,
        torch.matmul,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.add_(b),
        torch.maximum,
    ):
        with pytest.raises(
            RuntimeError, match=r"different placements[\s\S]*x.to_global\(placement="
        ):
            op(x, y)
    with pytest.raises(RuntimeError, match=r"different placements"):
        x.grad = y
    assert (x.to_global(placement=y.placement) + y).sum().item() == 32
    with pytest.raises(ValueError, match="2 axes"):
        x.to_global(placement=Placement("cpu", [[0, 1]]))
    with pytest.raises(ValueError, match="outside the world"):
        x.to_global(placement=Placement("cpu", [7]))


def test_ops_over_placements_raise_with_the_call_that_mends_it():
    pool(2).run(mixed)


def masked(x: Any, w: Any, move: Callable[[Any], Any]) -> tuple:
    h = move(x @ w)
    kept = h[h > 0]
    filled = h * 1.0
    filled[h < 0] = kept.mean()
    counts = torch.unique((h > 0).sum(0))
    return kept, kept.square().sum() + filled.sum(), torch.nonzero(h > 1), counts, torch.equal(h, h)


@pytest.mark.parametrize("sbp", [S(0), B], ids=str)
@on_ranks(3)
def test_ranks_outside_are_told_shapes_that_depend_on_values(rank: int, sbp: Any) -> None:
    x, w = randn(5, 6), randn(6, 6, seed=1)
    plain = w.clone().requires_grad_()
    wanted = masked(x, plain, lambda h: h)
    first, second = Placement("cpu", [0]), Placement("cpu", [2, 1])
    ours = consistent.distribute(w, first, B).requires_grad_()
    given = masked(
        consistent.distribute(x, first, B), ours, lambda h: h.to_global(placement=second, sbp=sbp)
    )
    assert_same(given, wanted)
    wanted[1].backward()
    given[1].backward()
    assert_same(ours.grad, plain.grad)


# -- the documents' programs -----------------------------------------------------------------------


DOUBLE = torch.float64


class StageModule(nn.Module):
    def __init__(self, in_dims: int, out_dims: int, placement: Any = None, sbp: Any = None) -> None:
        super().__init__()
        made = consistent.randn(in_dims, out_dims, dtype=DOUBLE, placement=placement, sbp=sbp)
        self.w = nn.Parameter(made)

    def forward(self, x: Any) -> Any:
        return torch.matmul(x, self.w)


class ModuleModel(nn.Module):
    """Data parallel on the first placement, tensor parallel on the second."""

    def __init__(self, first: Placement, second: Placement) -> None:
        super().__init__()
        self.m_stage0 = StageModule(5, 8, placement=first, sbp=B)
        self.m_stage1 = StageModule(8, 3, placement=second, sbp=S(1))

    def forward(self, x: Any) -> tuple[Any, Any]:
        out_stage0 = self.m_stage0(x)
        in_stage1 = out_stage0.to_global(placement=self.m_stage1.w.placement, sbp=B)
        return out_stage0, self.m_stage1(in_stage1)


@on_ranks(4)
def test_mixed_parallelism_of_the_documents_on_four_ranks(rank: int) -> None:
    first, second = Placement("cpu", [0, 1]), Placement("cpu", [2, 3])
    net = ModuleModel(first, second)
    x = consistent.randn(4, 5, dtype=DOUBLE, placement=first, sbp=S(0))
    out0, out1 = net(x)
    assert out0.shape == (4, 8) and out1.shape == (4, 3) and out1.sbp == (S(1),)
    w0, w1 = net.m_stage0.w.full().requires_grad_(), net.m_stage1.w.full().requires_grad_()
    plain = x.full() @ w0 @ w1
    assert_same(out1, plain)
    out1.square().sum().backward()
    plain.square().sum().backward()
    assert_same([net.m_stage0.w.grad, net.m_stage1.w.grad], [w0.grad, w1.grad])


# -- placement_scope -------------------------------------------------------------------------------


@on_ranks(2)
def test_scope_says_where_new_tensors_go(rank: int) -> None:
    p0, p1 = Placement("cpu", [0]), Placement("cpu", [[0], [1]])
    with placement_scope(p0):
        a = consistent.zeros(3)
        with placement_scope(p1):
            made = [
                consistent.randn(4, sbp=(S(0), B)), consistent.arange(5), consistent.tensor([1.0]),
                consistent.distribute(torch.ones(3)), consistent.full((2,), 1.0, sbp=(P, B)),
            ]  # fmt: skip
            net = consistent.parallelize(nn.Linear(3, 3))
        b = consistent.zeros(3, placement=p1, sbp=(B, B))
        c = consistent.ones(3, placement=p1)
    assert [x.placement for x in made] == [p1] * 5 and [x.sbp[0] for x in made] == [
        S(0),
        B,
        B,
        B,
        P,
    ]
    assert net.weight.placement == p1 and net.weight.sbp == (B, B)
    assert (a.placement, b.placement, c.placement) == (p0, p1, p1) and c.sbp == (B, B)
    with pytest.raises(TypeError, match="placement and sbp is missing"):
        consistent.zeros(3)
