"""An unchanged module trains as it does alone, whatever the plan; a wrong plan changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, GlobalTensor, Placement, S
from tests.ranks import SIZES, in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn


class _Tied(nn.Module):
    """A tied embedding, buffers, a frozen parameter, an empty slot and a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_parameter("none", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids) * self.scale + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


PLANS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "everything": {
        "embed.weight": S(0),
        "head.weight": S(0),
        "blocks.*": S(0),
        "scale": S(0),
        "shift": S(0),
    },
    "first_match_counts": {"blocks.0.*": S(0), "blocks.?.weight": S(1), "*": B},
}


def _trained(at: Laid, plan: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = at.module(_Tied().double(), plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 2]])
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(at(ids, S(0))).flatten(0, 1), at(ids.flip(1), S(0)).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss)
    assert model.head.weight is model.embed.weight and model.none is None
    assert model.scale.grad is None
    model.eval()
    return (
        losses,
        model.state_dict(),
        [p.grad for p in model.parameters()],
        model.calls,
        copy.deepcopy(model)(at(ids, B)),
    )


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_module_trains_as_it_does_alone(plan: str, world: int) -> None:
    pool(world).run(compare, _trained, GRIDS[world], PLANS[plan])


def _normalised(at: Laid) -> Any:
    torch.manual_seed(0)
    net = at.module(
        nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
        ).double()
    )
    y = net(at(randn(5, 2, 5), S(0)))
    y.square().sum().backward()
    return y, net.state_dict(), [p.grad for p in net.parameters()]


@pytest.mark.parametrize("world", SIZES)
def test_buffers_follow_the_whole_batch(world: int) -> None:
    pool(world).run(compare, _normalised, GRIDS[world])


class _Shared(nn.Module):
    """One module in two places, a weight in two modules, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.norm = nn.BatchNorm1d(4)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.tanh(self.first(self.embed(ids)))).flatten(0, 1)
        return self.head(self.norm(x))


def _all_names(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


NAMES = sorted(_all_names(_Shared()))
BY_NAME: dict[str, dict[str, Any]] = {
    **{name: {name: S(0)} for name in NAMES if not name.endswith("num_batches_tracked")},
    **{f"{name} and the rest": {name: S(0), "*": B} for name in NAMES if "weight" in name},
    "all": {"*": S(0)},
    "all but one": {"head.weight": B, "*": S(0)},
    "normalisation": {"norm.*": S(0)},
    "as text": {"*": "S(0)"},
}


def _named(at: Laid, plan: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = at.module(_Shared().double(), plan)
    assert model.first is model.again and model.head.weight is model.embed.weight
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 2]])
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(model(at(ids, S(0))), at(ids.flip(1), S(0)).flatten())
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        losses.append(loss)
    return losses, model.state_dict(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("plan", BY_NAME)
def test_a_tensor_goes_by_any_of_its_names(plan: str) -> None:
    for world in in_turn(list(BY_NAME).index(plan)):
        pool(world).run(compare, _named, GRIDS[world], BY_NAME[plan])


@on_ranks(2)
def test_a_tied_tensor_lies_as_any_of_its_names_says(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    for name in NAMES:
        if not name.endswith("num_batches_tracked"):
            for plan in ({name: S(0)}, {name: S(0), "*": B}):
                model = consistent.parallelize(_Shared(), p, plan)
                chosen = _all_names(model)[name]
                for value in _all_names(model).values():
                    assert value.sbp == ((S(0),) if value is chosen else (B,))
    model = consistent.parallelize(_Shared(), p, {"*": S(0)})
    for value in _all_names(model).values():
        assert value.sbp == ((S(0),) if value.ndim else (B,))


# -- lazy modules ----------------------------------------------------------------------------------

LAZY = sorted(name for name in dir(nn) if name.startswith("Lazy"))


def _lazy(name: str) -> nn.Module:
    cls = getattr(nn, name)
    if "Norm" in name:
        return cls(affine=True, track_running_stats=True)
    return cls(4, 2) if "Conv" in name else cls(4)


def _sample(name: str) -> torch.Tensor:
    return randn(*(5, 3) if name == "LazyLinear" else (5, 3, *[4] * int(name[-2])))


@on_ranks(2)
def test_a_lazy_module_is_shown_an_input_first(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    for name in LAZY:
        model = nn.Sequential(nn.Linear(3, 3), _lazy(name))
        before = list(model.parameters())
        with pytest.raises(ValueError, match=f"no shape yet, for {name} .* module\\(sample\\)"):
            consistent.parallelize(model, p)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def _initialised(at: Laid) -> Any:
    found = []
    for name in LAZY:
        torch.manual_seed(0)
        model = nn.Sequential(_lazy(name)).double()
        model(_sample(name))
        at.module(model, {"*": S(0)})
        y = model(at(_sample(name), S(0)))
        y.square().sum().backward()
        found += [y, model.state_dict(), [p.grad for p in model.parameters()]]
    return found


@pytest.mark.parametrize("world", SIZES)
def test_a_lazy_module_that_has_seen_an_input_is_like_any(world: int) -> None:
    pool(world).run(compare, _initialised, GRIDS[world], timeout=120)


@on_ranks(2)
def test_parameters_and_buffers_become_global(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    model = _Tied()
    same = consistent.parallelize(
        model, p, {"embed.weight": S(0), "head.weight": S(0), "blocks.*.bias": S(-1)}
    )
    assert same is model
    for _, value in [*model.named_parameters(), *model.named_buffers()]:
        assert type(value) is GlobalTensor
    assert (
        all(isinstance(v, nn.Parameter) for v in model.parameters())
        and len(list(model.parameters())) == 6
    )
    assert (
        model.embed.weight.sbp == (S(0),)
        and model.blocks[1].bias.sbp == (S(0),)
        and model.shift.sbp == (B,)
    )
    assert not model.scale.requires_grad and model.blocks[0].weight.requires_grad
    before = dict(model.named_parameters())
    consistent.parallelize(model, p)  # what is global stays as it is
    assert all(before[k] is v for k, v in model.named_parameters())


def _refused(rank: int, plan: dict[str, Any], change: bool) -> str:
    p = consistent.placement("cpu", [0, 1])
    torch.manual_seed(0)
    model = _Tied()
    if change:  # the last parameter alone
        model.blocks[1].bias.data += rank
    before = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    try:
        consistent.parallelize(model, p, plan, check=change)
    except (ValueError, RuntimeError) as error:
        for key, value in model.state_dict(keep_vars=True).items():
            assert value is before[key][0] and type(value) is not GlobalTensor
            assert_same(value, before[key][1])
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"blocks.*": S(0), "decoder.*": S(0)},
            ["'decoder.*'", "matches no parameter", "named_parameters"],
        ),
        ({"scale": S(1)}, ["'scale'", "S(1)", "Split one of its dims"]),
        ({"calls": S(0)}, ["'calls'", "no dim to split"]),
        ({"scale": (S(0), B)}, ["'scale'", "2 entries"]),
        (
            {"embed.weight": S(0), "head.weight": S(1)},
            ["'embed.weight'", "'head.weight'", "tied", "same SBP"],
        ),
        ({"blocks.*": "S(x)"}, ["S(x)", "^"]),
    ],
)
def test_a_wrong_plan_is_an_error_and_changes_nothing(
    plan: dict[str, Any], words: list[str]
) -> None:
    for message in pool(2).run(_refused, plan, False):
        assert all(word in message for word in words), message


def test_check_finds_modules_that_differ_between_ranks() -> None:
    for message in pool(2).run(_refused, {}, True):
        assert "differ" in message, message


# -- once more -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_module_that_is_parallelized_keeps_its_plan(rank: int) -> None:
    p = Placement("cpu", [0, 1])
    for plan in ("data", "zero1", "zero3", {"0.*": S(0)}):
        model = consistent.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), p, plan)
        held = consistent.plan_of(model)
        for again in (None, plan, held):
            assert consistent.plan_of(consistent.parallelize(model, p, again)) is held
        consistent.parallelize(model, p, inputs=S(0))
        assert model(torch.ones(1, 4)).shape == (2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        consistent.move(model, optimizer, p, None)
        assert consistent.plan_of(model) == held


@on_ranks(2)
def test_another_plan_for_a_parallelized_module_is_an_error(rank: int) -> None:
    p = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Linear(4, 4), p, "data")
    for plan in ("zero1", "zero3", {"weight": S(0)}):
        with pytest.raises(ValueError, match=r"plan: 'weight' is B, and .*consistent\.move"):
            consistent.parallelize(model, p, plan)
    with pytest.raises(ValueError, match=r"another plan\. Call consistent\.move"):
        consistent.parallelize(model, p, "auto", example=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"is on .*already.*consistent\.move"):
        consistent.parallelize(model, Placement("cpu", [0]))
    assert model.weight.sbp == (B,)


@on_ranks(2)
def test_a_layer_that_is_added_gets_a_plan_of_its_own(rank: int) -> None:
    p = Placement("cpu", [0, 1])
    model = consistent.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), p, "zero1")
    model.append(nn.Linear(4, 4))
    model[1] = nn.Linear(4, 4, bias=False)
    consistent.parallelize(model, p, "zero3")
    plan = consistent.plan_of(model)
    assert sorted(plan.tensors) == ["0.bias", "0.weight", "1.weight", "2.bias", "2.weight"]
    for name, sbp in (("0.weight", B), ("1.weight", S(0)), ("2.bias", S(0))):
        layouts = plan.layouts(name)
        assert layouts is not None and (layouts.sbp, layouts.step) == ((sbp,), (S(0),))
        assert model.get_parameter(name).sbp == (sbp,)
    consistent.move(model, None, p, None)
    assert consistent.plan_of(model) == plan


def _of_dtensors(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    with pytest.raises(TypeError) as raised:
        consistent.parallelize(model, Placement("cpu", [0, 1]), "data")
    return str(raised.value)


def test_a_module_of_dtensors_is_an_error_on_every_rank() -> None:
    for message in pool(2).run(_of_dtensors):
        assert "'0.weight' is a DTensor" in message and '"zero3"' in message
