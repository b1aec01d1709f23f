"""Whole matrices on their owners: any optimizer gives the values of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import consistent
from consistent import B, Placement, S, matrix_step
from consistent.nn.owned.owners import owners_of
from consistent.tensor.storage.step_layout import OwnedState
from mirrored.transports.counting import counting
from mirrored.transports.default import current
from tests.consistent.nn.owned.shampoo import Batched, Shampoo, Soap
from tests.ranks import ALL, SIZES, on_ranks, pool
from tests.twins import Laid, assert_same, randn

O = torch.optim  # noqa: E741


class Net(nn.Module):
    """A tied embedding, vectors, a kernel, matrices of one shape, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up, self.norm, self.down = nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 5)
        self.mix = nn.Conv2d(2, 3, (2, 1))
        self.same = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.idle = nn.Linear(5, 3)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.norm(self.up(self.embed(ids)))))
        for layer in self.same:
            x = x + torch.tanh(layer(x))
        return self.head(x + self.mix(x[:, None, :, :].expand(-1, 2, -1, -1)).mean(1).mean(1, True))


IDS = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 0], [0, 1, 2, 3], [3, 3, 5, 6], [6, 5, 4, 3]])
PLANS: dict[int, dict[str, tuple[Any, Any]]] = {
    k: {plan: (ranks, plan) for plan in ("data", "zero1", "zero2", "zero3", "tensor")}
    for k, ranks in ((2, [0, 1]), (3, [2, 0, 1]), (4, [3, 1, 0, 2]))
}
PLANS[4]["zero3 and tensor"] = [[0, 1], [2, 3]], {"dp": "zero3", "tp": "tensor"}
PLANS[4]["zero1 and tensor"] = [[0, 2], [1, 3]], {"dp": "zero1", "tp": "tensor"}
PLANS[4]["on two of four"] = [1, 3], "zero3"


def placed(where: Any) -> Placement:
    return (
        Placement("cpu", where, ("dp", "tp"))
        if isinstance(where[0], list)
        else Placement("cpu", where)
    )


def net(at: Laid, plan: Any) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    return model if at.placement is None else consistent.parallelize(model, at.placement, plan)


def loss_of(at: Laid, model: Any, ids: torch.Tensor = IDS) -> Any:
    return F.cross_entropy(model(at(ids, S(0))).flatten(0, 1), at(ids.flip(1), S(0)).flatten())


def owned(at: Laid, optimizer: Any) -> Any:
    return optimizer if at.placement is None else matrix_step(optimizer)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Muon": lambda m: O.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.02),
    "Shampoo": lambda m: Shampoo(m.parameters()),
    "Batched": lambda m: Batched([p for p in m.parameters() if p.ndim > 1]),
    "AdamW": lambda m: O.AdamW(m.parameters(), lr=0.02, foreach=True),
}


def trained(at: Laid, plan: Any, name: str) -> Any:
    model = net(at, plan)
    made = OPTIMIZERS[name](model)
    optimizer = made if name == "Muon" else owned(at, made)  # which does so by itself
    schedule = O.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for _ in range(2):  # the second has the state and the learning rate that the first left
        optimizer.zero_grad()
        losses.append(loss_of(at, model))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    if at.placement is not None:
        assert any(isinstance(x, OwnedState) for x in optimizer.state.values())
    return (
        losses,
        [p.grad for p in model.parameters()],
        dict(model.state_dict()),
        optimizer.state_dict()["state"],
    )


def _every_plan(rank: int, plans: dict[str, tuple[Any, Any]], world: int) -> None:
    for i, name in enumerate(OPTIMIZERS):
        wanted = trained(Laid(None), None, name)
        for k, (plan, (ranks, given)) in enumerate(plans.items()):
            # Plans of a line that are left out are in the other world, and those of grids and of
            # some ranks alone have half of the optimizers.
            if not ALL and (i + k) % 2 != world % 2:
                continue
            made = trained(Laid(placed(ranks)), given, name)
            assert_same(made, wanted, f"{name} under {plan}", rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("world", SIZES)
def test_every_optimizer_gives_the_values_of_one_process(world: int) -> None:
    pool(world).run(_every_plan, PLANS[world], world)


OF_MATRICES: dict[str, Callable[[Any], Any]] = {
    "Muon": OPTIMIZERS["Muon"],
    "SOAP": lambda m: Soap([p for p in m.parameters() if p.ndim == 2]),
}


def stepped(at: Laid, plan: Any, name: str) -> list[Any]:
    """The parameters after steps with given gradients, in float32."""
    torch.manual_seed(0)
    model = Net() if at.placement is None else consistent.parallelize(Net(), at.placement, plan)
    made = OF_MATRICES[name](model)
    optimizer = made if name == "Muon" else owned(at, made)
    for i in range(2):
        for k, p in enumerate(model.parameters()):
            p.grad = at(randn(*p.shape, seed=10 * i + k).float())
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@on_ranks(4)
def test_equal_gradients_give_the_bits_of_one_process(rank: int) -> None:
    """Also where an optimizer makes much of a rounding: it runs on the tensors that it would get
    in one process."""
    for name in OF_MATRICES:
        wanted = stepped(Laid(None), None, name)
        for plan, (ranks, given) in PLANS[4].items():
            made = stepped(Laid(placed(ranks)), given, name)
            for x, y in zip(made, wanted, strict=True):
                assert torch.equal(x.full(), y), f"{name} under {plan}"


# -- in every situation ----------------------------------------------------------------------------


def accumulated(at: Laid, plan: Any) -> Any:
    model = net(at, plan)
    optimizer = owned(at, Shampoo(model.parameters()))
    for set_to_none in (True, False):
        with consistent.no_sync():
            loss_of(at, model).backward()
        if set_to_none:
            loss_of(at, model, IDS.flip(0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(at, model).backward()
    return [p.grad for p in model.parameters()], dict(model.state_dict())


def by_closures(at: Laid, plan: Any) -> Any:
    model = net(at, plan)
    optimizer = owned(at, Shampoo(model.parameters()))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(at, model)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)], dict(model.state_dict())


def with_a_group_later(at: Laid, plan: Any) -> Any:
    model = net(at, plan)
    optimizer = owned(at, Shampoo([{"params": list(model.up.parameters()), "lr": 0.3}]))
    other = O.SGD(model.down.parameters(), lr=0.1)
    for i in range(4):
        if i == 2:
            optimizer.add_param_group({"params": list(model.same.parameters()), "momentum": 0.1})
        loss_of(at, model).backward()
        optimizer.step()
        other.step()
        model.zero_grad()
    return dict(model.state_dict()), optimizer.state_dict()["state"]


def scaled(at: Laid, plan: Any) -> Any:
    model = net(at, plan)
    optimizer, scaler = owned(at, Shampoo(model.parameters())), torch.amp.GradScaler("cpu")
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(at, model) * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), dict(model.state_dict())


def in_some_groups_alone(at: Laid, plan: Any) -> Any:
    """The others are stepped as the plan says."""
    model = net(at, plan)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True},
        {"params": [p for p in model.parameters() if p.ndim != 2], "use_muon": False},
    ]
    optimizer = owned(at, O.AdamW(groups, lr=0.1, foreach=True))
    for _ in range(2):
        loss_of(at, model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), optimizer.state_dict()["state"]


def resumed(at: Laid, plan: Any) -> Any:
    """From a state_dict, from a copy of the optimizer, and from steps in the plan's own way."""
    model = net(at, plan)
    optimizer = Shampoo(model.parameters())
    found = []
    for way in ("as it is", "owned", "loaded", "copied", "into another way"):
        if way == "owned":
            optimizer = owned(at, optimizer)
        if way in ("loaded", "into another way"):
            kept = copy.deepcopy(optimizer.state_dict())
            made = Shampoo(model.parameters())
            optimizer = owned(at, made) if way == "loaded" else made
            optimizer.load_state_dict(kept)
        if way == "copied":
            model, optimizer = copy.deepcopy((model, optimizer))
        optimizer.zero_grad()
        loss_of(at, model).backward()
        optimizer.step()
        found.append(copy.deepcopy(dict(model.state_dict())))
    return found


def with_hooks(at: Laid, plan: Any) -> Any:
    """Hooks of users see parameters and gradients as they lie."""
    model = net(at, plan)
    optimizer, norms = owned(at, Shampoo(model.parameters())), []

    def before(*_: Any) -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    def after(*_: Any) -> None:
        norms.append(torch.stack([p.detach().sum() for p in model.parameters()]).sum())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for _ in range(2):
        loss_of(at, model).backward()
        optimizer.step()
        model.zero_grad()
    return norms, dict(model.state_dict())


def in_short_floats(at: Laid, plan: Any) -> Any:
    """Copies in float32 lie with the owners. Sums of gradients round as in one process: there is
    one row."""
    model = net(at, plan).bfloat16()
    if at.placement is None:
        master = copy.deepcopy(model).float()
    optimizer = Shampoo((model if at.placement is not None else master).parameters())
    if at.placement is not None:
        optimizer = consistent.master_weights(matrix_step(optimizer))
    for i in range(3):
        for k, p in enumerate(model.parameters()):
            if p.ndim:
                p.grad = at(randn(*p.shape, seed=10 * i + k).bfloat16())
        if at.placement is None:
            for p, copied in zip(model.parameters(), master.parameters(), strict=True):
                copied.grad = p.grad.float()
        optimizer.step()
        if at.placement is None:
            for p, copied in zip(model.parameters(), master.parameters(), strict=True):
                p.data.copy_(copied.data)
    return dict(model.state_dict())


CASES = [
    accumulated,
    by_closures,
    with_a_group_later,
    scaled,
    in_some_groups_alone,
    resumed,
    with_hooks,
    in_short_floats,
]


def _every_situation(rank: int, ranks: list[int], plans: list[str]) -> None:
    for i, case in enumerate(CASES):
        wanted = case(Laid(None), None)
        for plan in plans if ALL else plans[i % 2 :: 2]:
            given = case(Laid(Placement("cpu", ranks)), plan)
            assert_same(given, wanted, f"{case.__name__} under {plan}", rtol=1e-6, atol=1e-8)


# Each situation under one of two plans, on two ranks and on three.
@pytest.mark.parametrize(
    ("ranks", "plans"), [([0, 1], ["data", "zero2"]), ([2, 0, 1], ["zero1", "zero3"])]
)
def test_in_every_situation(ranks: list[int], plans: list[str]) -> None:
    pool(len(ranks)).run(_every_situation, ranks, plans)


# -- what is sent, and where it lies ---------------------------------------------------------------


def _matrices(placement: Placement, plan: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24, bias=False) for _ in range(12)]
    model = consistent.parallelize(nn.Sequential(*layers), placement, plan)
    optimizer = O.Muon(model.parameters(), lr=0.1)
    x = consistent.distribute(randn(6, 24).float(), placement, S(0))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if _ == 0:
            optimizer.step()
    return model, optimizer


@on_ranks(2, 3, 4)
def test_a_step_is_one_exchange_there_and_one_back(rank: int) -> None:
    k = current().size
    placement = Placement("cpu", list(range(k)))
    whole, share = 12 * 24 * 24 * 4, 12 * 24 * 24 * 4 // k
    there = {"data": 0, "zero1": 0, "zero2": share, "zero3": 2 * share, "tensor": 2 * share}
    back = {"data": whole, "zero1": whole, "zero2": whole, "zero3": share, "tensor": share}
    for plan in there:
        model, optimizer = _matrices(placement, plan)
        with counting() as sent, FlopCounterMode(display=False) as flops:
            optimizer.step()
        exchanges = [call for call in sent.calls if call.name == "exchange"]
        assert [call.bytes for call in exchanges if call.bytes] == [
            each * (k - 1) // k for each in (there[plan], back[plan]) if each
        ], plan
        assert sent.bytes == sum(call.bytes for call in exchanges), plan
        assert flops.get_total_flops() == 12 // k * 5 * 3 * 2 * 24**3, plan
        mine = [state for state in optimizer.state.values() if state]
        assert len(mine) == 12 // k and all(
            type(s["momentum_buffer"]) is torch.Tensor for s in mine
        )
        told = optimizer.state_dict()["state"]
        assert {x["momentum_buffer"].placement.size for x in told.values()} == {1} and len(
            told
        ) == 12


@on_ranks(2)
def test_a_parameter_keeps_its_memory_and_its_class(rank: int) -> None:
    model, optimizer = _matrices(Placement("cpu", [0, 1]), "zero3")
    weight = model[0].weight
    alias, memory, grad = weight.detach(), weight.to_local().data_ptr(), weight.grad
    optimizer.step()
    assert type(weight) is consistent.GlobalTensor and weight.grad is grad
    assert weight.to_local().data_ptr() == memory
    assert torch.equal(alias.full(), weight.full())


# -- other places ----------------------------------------------------------------------------------


def _saved(rank: int, folder: str) -> None:
    wanted = None
    for i, (ranks, plan, way) in enumerate(
        [
            ([0, 1], "zero3", owned),
            ([0], "data", None),
            ([1, 0], "zero1", owned),
            ([0, 1], "tensor", None),
        ]
    ):
        at = Laid(Placement("cpu", ranks))
        model = net(at, plan)
        optimizer = Shampoo(model.parameters())
        optimizer = optimizer if way is None else way(at, optimizer)
        if i:
            consistent.checkpoint.load(folder, model=model, optimizer=optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(at, model).backward()
            optimizer.step()
        if wanted is None:
            consistent.checkpoint.save(folder, model=model, optimizer=optimizer)
            states = [copy.deepcopy(optimizer.state_dict()["state"])]
            loss_of(at, model).backward()
            optimizer.zero_grad()
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(at, model).backward()
                optimizer.step()
        given = {k: x.full() for k, x in model.state_dict().items()}
        wanted = wanted or given
        assert_same(given, wanted, f"{plan} on {ranks}", rtol=1e-6, atol=1e-8)
        if i == 0:
            assert states[0][0]["sums"][0].shape == (7, 7)


def test_checkpoints_hold_logical_tensors(tmp_path: Path) -> None:
    pool(2).run(_saved, str(tmp_path))


@on_ranks(3)
def test_a_job_moves_with_the_states_of_its_owners(rank: int) -> None:
    def losses(moves: dict[int, tuple[list[int], str]]) -> list[float]:
        at = Laid(Placement("cpu", [0, 1]))
        model = net(at, "zero3")
        optimizer, found = matrix_step(Shampoo(model.parameters())), []
        for i in range(6):
            if i in moves:
                at = Laid(Placement("cpu", moves[i][0]))
                consistent.move(model, optimizer, at.placement, moves[i][1])
            optimizer.zero_grad()
            loss = loss_of(at, model)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    moved = losses({2: ([2, 1], "zero1"), 3: ([2, 1], "tensor"), 4: ([0, 1, 2], "zero2")})
    assert moved == pytest.approx(losses({}), rel=1e-6)


@on_ranks(4)
def test_owners_of_a_stage_are_its_ranks(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).double()
    staged, stages = copy.deepcopy(plain), [Placement("cpu", [0, 1]), Placement("cpu", [2, 3])]
    pipe = consistent.nn.pipeline(
        staged,
        stages,
        ["3"],
        loss=F.mse_loss,
        micro_batches=2,
        plan=["zero3", "tensor"],
    )
    ways = [Shampoo(plain.parameters()), matrix_step(Shampoo(staged.parameters()))]
    for i in range(3):
        x, y = randn(8, 6, seed=i), randn(8, 6, seed=9 + i)
        for optimizer in ways:
            optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        pipe.step(x, y)
        for optimizer in ways:
            optimizer.step()
    assert_same(list(staged.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-8)
    owners = owners_of(ways[1])
    assert owners is not None
    params: list[Any] = list(staged.parameters())
    for p in params:
        assert owners.owner_of(p).first_rank in p.placement.ranks
    assert len({owners.owner_of(p).first_rank for p in params}) == 4


# -- what cannot be --------------------------------------------------------------------------------


class Raising(O.SGD):
    """Raises where the first column of a matrix is 7."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                if p.grad.flatten()[0].item() == 7.0:
                    raise ValueError(f"a 7 in {tuple(p.shape)}")
                p.data.sub_(p.grad)


@on_ranks(2, 3)
def test_an_error_of_one_owner_is_raised_on_all_ranks_and_nothing_changes(rank: int) -> None:
    placement = Placement("cpu", list(range(current().size)))
    for plan, dtype in (
        ("data", torch.float32),
        ("zero3", torch.float32),
        ("zero1", torch.bfloat16),
    ):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(dtype)
        model = consistent.parallelize(layers, placement, plan)
        optimizer = matrix_step(Raising(model.parameters(), lr=1.0))
        if dtype is torch.bfloat16:
            consistent.master_weights(optimizer)
        params: list[Any] = list(model.parameters())
        before = [p.detach().full().clone() for p in params]
        for p in params:
            value = 7.0 if p.shape == (3, 4) else 1.0
            p.grad = consistent.full(p.shape, value, placement=placement, sbp=B, dtype=dtype)
        with pytest.raises(ValueError, match=r"a 7 in \(3, 4\)"):
            optimizer.step()
        assert {type(p) for p in params} == {consistent.GlobalTensor}
        for p, x in zip(params, before, strict=True):
            assert torch.equal(p.detach().full(), x)
            p.grad.fill_(1.0)
        optimizer.step()
        for p, x in zip(params, before, strict=True):
            assert torch.equal(p.detach().full(), (x.float() - 1.0).to(dtype))


@on_ranks(2)
def test_an_error_of_a_closure_leaves_all_as_it_lies(rank: int) -> None:
    def failing() -> None:
        raise ValueError("no loss")

    for plan in ("zero1", "zero3"):
        for way in (matrix_step, lambda optimizer: optimizer):
            model: Any = consistent.parallelize(nn.Linear(4, 4), Placement("cpu", [0, 1]), plan)
            optimizer = way(O.AdamW(model.parameters()))
            lies = model.weight.sbp
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(ValueError, match="no loss"):
                optimizer.step(failing)
            assert type(model.weight) is consistent.GlobalTensor and model.weight.sbp == lies
            optimizer.step()


@on_ranks(2)
def test_what_no_owner_can_step_says_so_on_all_ranks(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    model = consistent.parallelize(
        nn.EmbeddingBag(6, 4, sparse=True, mode="sum"), placement, "data"
    )
    optimizer = matrix_step(Shampoo(model.parameters()))
    model(consistent.distribute(torch.tensor([[1, 2], [0, 3]]), placement, S(0))).sum().backward()
    with pytest.raises(TypeError, match="has a sparse gradient"):
        optimizer.step()
    _, muon = _matrices(placement, "zero3")
    with pytest.raises(RuntimeError, match="steps whole matrices already"):
        matrix_step(muon)
    conv = consistent.parallelize(nn.Conv2d(2, 3, 2), placement, "zero3")
    for p in conv.parameters():  # with 4 dims, and with one
        with pytest.raises(ValueError, match="only supports 2D"):
            O.Muon([p])


def test_it_takes_optimizers_of_global_parameters() -> None:
    with pytest.raises(TypeError, match="optimizer is a Linear"):
        matrix_step(nn.Linear(2, 2))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="no parameter of this SGD is global"):
        matrix_step(O.SGD(nn.Linear(2, 2).parameters()))
