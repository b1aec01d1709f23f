"""zero1, zero2: any optimizer steps the slices of its rank, and gives the values of one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn import Layouts, Plan
from mirrored.transports.counting import counting
from tests.ranks import ALL, SIZES, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up, self.norm, self.down = nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.norm(self.up(self.embed(ids))))))


IDS = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 0], [0, 1, 2, 3], [3, 3, 5, 6], [6, 5, 4, 3]])

# On two axes the second one splits columns and rows.
TWO_AXES = {
    name: Plan(
        {
            "up.*": Layouts((B, S(0))),
            "down.weight": Layouts((B, S(1)), grad=(grad, S(1)), step=(S(0), S(1))),
            "*": Layouts((B, B), grad=(grad, B), step=(S(0), B)),
        }
    )
    for name, grad in (("zero1", B), ("zero2", S(0)))
}
TWO_AXES["zero3"] = Plan(
    {
        "up.*": Layouts((B, S(0))),
        "down.weight": Layouts((S(0), S(1)), use=(B, S(1))),
        "*": Layouts((S(0), B), use=(B, B)),
    }
)
PLANS = ["zero1", "zero2", "zero3"]


def net(at: Laid, plan: str) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    if at.placement is None:
        return model
    given: Any = TWO_AXES[plan] if at.placement.ndim == 2 else plan
    return consistent.parallelize(model, at.placement, given)


def loss_of(at: Laid, model: Any) -> Any:
    return F.cross_entropy(model(at(IDS, S(0))).flatten(0, 1), at(IDS.flip(1), S(0)).flatten())


O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: O.AdamW(p, lr=0.02),
    "AdamW fused": lambda p: O.AdamW(p, lr=0.02, fused=True),
    "AdamW foreach": lambda p: O.AdamW(p, lr=0.02, foreach=True, amsgrad=True),
    "Adafactor": lambda p: O.Adafactor(p, lr=0.02),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.02),
    "LBFGS": lambda p: O.LBFGS(p, lr=0.1, max_iter=3),
    "Muon": lambda p: O.Muon([x for x in p if x.ndim == 2], lr=0.02),
}


def trained(at: Laid, plan: str, name: str) -> Any:
    model = net(at, plan)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    schedule = O.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(at, model)
        loss.backward()
        return loss

    losses = []
    for _ in range(2):  # the second has the state and the learning rate that the first left
        if name in ("LBFGS", "Adagrad"):
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        schedule.step()
    state = {} if name == "LBFGS" else optimizer.state_dict()["state"]
    return losses, [p.grad for p in model.parameters()], dict(model.state_dict()), state


# On four ranks there are two axes of two. Each plan has half of the optimizers there and the others
# on three ranks, and each optimizer is in both worlds.
CASES = [
    (plan, name, world)
    for i, plan in enumerate(PLANS)
    for k, name in enumerate(OPTIMIZERS)
    for world in ([2, 3, 4] if ALL else [3 + (i + k) % 2])
]


# Muon runs its products in bfloat16.
@pytest.mark.parametrize(("plan", "name", "world"), CASES)
def test_every_optimizer_gives_the_values_of_one_process(plan: str, name: str, world: int) -> None:
    pool(world).run(_compare, trained, GRIDS[world], plan, name)


def _compare(rank: int, case: Any, ranks: Any, plan: str, name: str) -> None:
    wanted, given = case(Laid(None), plan, name), case(Laid(Placement("cpu", ranks)), plan, name)
    assert_same(given, wanted, **({"rtol": 0.1, "atol": 0.02} if name == "Muon" else {}))


def accumulated(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    optimizer = O.AdamW(model.parameters(), lr=0.02)
    for set_to_none in (True, False):
        with consistent.no_sync():
            loss_of(at, model).backward()
        loss_of(at, model).backward()
        loss_of(at, model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(at, model).backward()
    return [p.grad for p in model.parameters()], dict(model.state_dict())


def not_zeroed(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(at, model).backward()
        optimizer.step()
    return [p.grad for p in model.parameters()], dict(model.state_dict())


def several_groups(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    first, second = list(model.up.parameters()), list(model.down.parameters())
    optimizer = O.SGD([{"params": first}, {"params": second, "lr": 0.5}], lr=0.1)
    other = O.Adam([model.embed.weight], lr=0.1)
    for _ in range(2):
        loss_of(at, model).backward()
        optimizer.step()
        other.step()
        optimizer.add_param_group({"params": [model.norm.weight]}) if len(
            optimizer.param_groups
        ) < 3 else None
        model.zero_grad()
    return dict(model.state_dict())


def stepping_within_backward(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    for p in model.parameters():
        optimizer = O.SGD([p], lr=0.1, momentum=0.5)

        def step(p: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss_of(at, model).backward()
    return dict(model.state_dict())


def scaled(at: Laid, plan: str) -> Any:
    model = net(at, plan).float()
    optimizer, scaler = O.AdamW(model.parameters(), lr=0.02), torch.amp.GradScaler("cpu")
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = loss_of(at, model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    return norms, dict(model.state_dict())


def resumed(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    optimizer = O.AdamW(model.parameters(), lr=0.02)
    loss_of(at, model).backward()
    optimizer.step()
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other = net(at, plan)
    other.load_state_dict(kept[0])
    again = O.AdamW(other.parameters(), lr=0.02)
    again.load_state_dict(kept[1])
    loss_of(at, other).backward()
    again.step()
    return dict(other.state_dict()), again.state_dict()["state"]


def after_a_graph_of_before(at: Laid, plan: str) -> Any:
    """A graph that is older than the step adds its gradients all the same."""
    model = net(at, plan)
    optimizer = O.SGD([model.norm.bias], lr=0.1)
    y = (model.norm.bias * 2).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    y.backward()
    return model.norm.bias.grad, model.norm.bias.detach()


def copied(at: Laid, plan: str) -> Any:
    model = copy.deepcopy(net(at, plan))
    optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(at, model).backward()
        optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()["state"]


def copied_after_backward(at: Laid, plan: str) -> Any:
    """Copies of parameters have no gradients, as torch's; the next backward is not added to one."""
    model = net(at, plan)
    loss_of(at, model).backward()
    twin = copy.deepcopy(model)
    before = [p.grad is None for p in twin.parameters()]
    loss_of(at, twin).backward()
    O.SGD(twin.parameters(), lr=0.1).step()
    return before, [p.grad for p in twin.parameters()], dict(twin.state_dict())


def sparse(at: Laid, plan: str) -> Any:
    """Gradients with entries for the rows that were looked up."""
    model = net(at, plan)
    model.embed.sparse = True
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    first = O.SparseAdam([model.embed.weight], lr=0.1)
    second = O.SGD([p for p in model.parameters() if p is not model.embed.weight], lr=0.1)
    for _ in range(3):
        model.zero_grad()
        loss_of(at, model).backward()
        first.step()
        second.step()
    return dict(model.state_dict()), model.embed.weight.grad.to_dense()


def with_gradients_of_gradients(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    loss_of(at, model).backward(create_graph=True)
    sum((p.grad**2).sum() for p in model.parameters()).backward()
    return [p.grad.detach() for p in model.parameters()]


SITUATIONS = [
    accumulated,
    not_zeroed,
    several_groups,
    stepping_within_backward,
    scaled,
    resumed,
    after_a_graph_of_before,
    copied,
    copied_after_backward,
    sparse,
    with_gradients_of_gradients,
]


# Each plan in each situation, in one world: three ranks, or two axes.
@pytest.mark.parametrize(
    ("case", "plan", "world"),
    [
        (case, plan, world)
        for i, case in enumerate(SITUATIONS)
        for k, plan in enumerate(PLANS)
        for world in (SIZES if ALL else [3 + (i + k) % 2])
    ],
)
def test_in_every_situation(case: Callable[..., Any], plan: str, world: int) -> None:
    pool(world).run(compare, case, GRIDS[world], plan)


# -- where things lie, and what is sent ------------------------------------------------------------


@on_ranks(2)
def test_gradients_and_state_lie_as_the_plan_says(rank: int) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    for plan, grad in (("zero1", B), ("zero2", S(0))):
        model = net(at, plan)
        optimizer = O.AdamW(model.parameters(), lr=0.02)
        for set_to_none in (True, False):
            loss_of(at, model).backward()
            assert {p.grad.sbp for p in model.parameters()} == {(grad,)}
            optimizer.step()
            assert {p.sbp for p in model.parameters()} == {(B,)}
            assert {p.grad.sbp for p in model.parameters()} == {(grad,)}
            optimizer.zero_grad(set_to_none)
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        assert {m.sbp for m in moments} == {(S(0),)}
        assert all(m.to_local().shape[0] == (m.shape[0] + 1 - rank) // 2 for m in moments)


@on_ranks(2)
def test_a_parameter_keeps_its_memory(rank: int) -> None:
    model = net(Laid(Placement("cpu", [0, 1])), "zero2")
    weight = model.up.weight
    alias, memory = weight.detach(), weight.to_local().data_ptr()
    loss_of(Laid(weight.placement), model).backward()
    O.SGD(model.parameters(), lr=0.1).step()
    assert weight.to_local().data_ptr() == memory
    assert torch.equal(alias.full(), weight.full())


@on_ranks(2)
def test_a_step_sends_what_it_updated_once(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Linear(8, 8), placement, "zero2")
    x = consistent.from_local(randn(3, 8).float(), placement, S(0))
    with counting() as sent:
        model(x).sum().backward()
    assert sent.bytes == (8 * 8 + 8) * 4 // 2
    with counting() as sent:
        O.AdamW(model.parameters()).step()
    assert sent.bytes == (8 * 8 + 8) * 4 // 2


@on_ranks(2)
def test_clipping_is_one_collective_in_every_layout(rank: int) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    for plan in PLANS:
        model = net(at, plan)
        loss_of(at, model).backward()
        with counting() as sent:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert len(sent.calls) == (0 if plan == "zero1" else 1), plan


@on_ranks(2)
def test_a_step_that_raises_leaves_right_values(rank: int) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    model, wanted = net(at, "zero1"), net(Laid(None), "zero1")
    optimizer, other = (O.SGD(m.parameters(), lr=0.1) for m in (model, wanted))

    def fail() -> None:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        optimizer.step(fail)
    for each, opt, where in ((model, optimizer, at), (wanted, other, Laid(None))):
        loss_of(where, each).backward()
        opt.step()
    assert_same(dict(model.state_dict()), dict(wanted.state_dict()))
    assert {p.sbp for p in model.parameters()} == {(B,)}


@on_ranks(2)
def test_a_parameter_is_saved_without_pickled_classes(rank: int) -> None:
    model, file = net(Laid(Placement("cpu", [0, 1])), "zero2"), io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same({k: v for k, v in loaded.items()}, {k: v.full() for k, v in
                                                    model.state_dict().items()})  # fmt: skip


@pytest.mark.parametrize("plan", ["data", "zero1", "zero2", "zero3", "tensor"])
@on_ranks(2)
def test_hooks_after_a_gradient_run_once_and_see_it(rank: int, plan: str) -> None:
    torch.manual_seed(0)
    place = consistent.placement("cpu", range(2))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    consistent.parallelize(model, place, plan, inputs=B)
    seen: list[Any] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full().sum().item()))
    for times in (1, 2):
        model(torch.ones(2, 4)).sum().backward()
        assert len(seen) == 4 * times
    wanted = [p.grad.full().sum().item() for p in model.parameters()]
    assert sorted(seen[4:]) == pytest.approx(sorted(wanted))


RESUMED = {
    **{name: OPTIMIZERS[name] for name in ("SGD", "AdamW", "AdamW fused", "AdamW foreach")},
    **{name: OPTIMIZERS[name] for name in ("Adafactor", "Adagrad")},
    "Adam": lambda p: O.Adam(p, lr=0.02),
    "Adam fused": lambda p: O.Adam(p, lr=0.02, fused=True),
}


# Each optimizer under two or three of the plans.
@on_ranks(2)
@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (plan, name)
        for i, plan in enumerate(["data", *PLANS, "tensor"])
        for k, name in enumerate(RESUMED)
        if ALL or (i + k) % 2 == 0
    ],
)
def test_a_plain_state_lies_as_the_step_does(rank: int, plan: str, name: str) -> None:
    """What one process saved: after load_state_dict each rank has its part, as in a run that never
    stopped, and the next losses are those of one process."""

    def stepped(at: Laid, model: Any, optimizer: Any, times: int) -> list[Any]:
        losses = []
        for _ in range(times):
            optimizer.zero_grad()
            losses.append(loss_of(at, model))
            losses[-1].backward()
            optimizer.step()
        return losses

    def held(optimizer: Any, model: Any) -> list[Any]:
        return [
            (key, getattr(x, "sbp", None), x.to_local().nbytes if hasattr(x, "sbp") else x.nbytes)
            for p in model.parameters()
            for key, x in sorted(optimizer.state[p].items())
            if isinstance(x, torch.Tensor) and x.shape == p.shape
        ]

    plain, at = Laid(None), Laid(Placement("cpu", [0, 1]))
    one = net(plain, plan)
    first = RESUMED[name](list(one.parameters()))
    stepped(plain, one, first, 2)
    saved = copy.deepcopy((one.state_dict(), first.state_dict()))
    wanted = stepped(plain, one, first, 2)

    never = net(at, plan)
    never_stopped = RESUMED[name](list(never.parameters()))
    stepped(at, never, never_stopped, 1)
    model = net(at, plan)
    model.load_state_dict(saved[0])
    optimizer = RESUMED[name](list(model.parameters()))
    optimizer.load_state_dict(saved[1])
    assert held(optimizer, model) == held(never_stopped, never)
    assert_same(stepped(at, model, optimizer, 2), wanted)
    assert held(optimizer, model) == held(never_stopped, never)
