from __future__ import annotations

import builtins
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, S, placement
from consistent.cost_model.built_in import BUILT_IN, uniform_cost_model
from consistent.cost_model.model import CostModel
from consistent.layout_problem.solve import solve
from consistent.nn.plan import Plan
from consistent.nn.planners.layout_search import best_plan
from consistent.nn.planners.layout_search.follow import follow
from consistent.nn.planners.layout_search.options import problem_of
from consistent.nn.planners.layout_search.record import record
from consistent.nn.planners.registry import plan_for
from consistent.nn.slots import plain_slots
from tests.ranks import pool

pytest.importorskip("scipy")

PAIR = placement("cpu", ranks=[0, 1])


def slow(flops: float) -> CostModel:
    """A machine so slow that work is worth sharing, whatever is sent for it."""
    return uniform_cost_model(
        "cpu",
        latency=3e-6,
        bandwidth=1.5e10,
        overhead=2e-7,
        memory=1e7,
        python=0.0,
        flops=flops,
    )


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.mlp = MLP(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(b, s, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 1, width: int = 8, heads: int = 2, vocabulary: int = 12):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def regress(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


def predict(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    return loss


def case(name: str):
    """(step, model, batch)."""
    torch.manual_seed(0)
    if name == "mlp":
        return regress, MLP(), (torch.randn(6, 8), torch.randn(6, 8))
    return predict, GPT(), (torch.randint(12, (4, 6)), torch.randint(12, (4, 6)))


DEVICE = {"small": BUILT_IN["cpu"], "slow": slow(1e6), "slow memory": slow(1e9)}


@pytest.mark.parametrize("machine", DEVICE)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_found_plan_takes_no_longer_than_plans_by_name(name, machine):
    step, model, batch = case(name)
    device = DEVICE[machine]
    program = record(step, model, PAIR, (model, *batch), {})
    found = follow(program, device, best_plan(step, PAIR, (model, *batch), machine=device))
    for given in ("data", "zero3", "tensor"):
        plan = plan_for(model, plain_slots(model), PAIR, given)
        assert found.seconds <= follow(program, device, plan).seconds


@pytest.mark.parametrize("machine", DEVICE)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_run_under_the_written_plan_takes_what_was_solved(name, machine):
    # A border boxes once for several readers, and the solution counts each of them.
    step, model, batch = case(name)
    device = DEVICE[machine]
    program = record(step, model, PAIR, (model, *batch), {})
    problem = problem_of(program, device)
    least, _ = problem.cost(solve(problem))
    found = follow(program, device, best_plan(step, PAIR, (model, *batch), machine=device))
    assert found.seconds == pytest.approx(least, rel=0.05)


def test_a_small_batch_splits_weights_and_a_large_one_splits_the_batch():
    with torch.device("meta"):
        model = MLP(512, 2048)
        small, large = torch.empty(16, 512), torch.empty(16384, 512)
    plan = best_plan(regress, PAIR, (model, small, small))
    assert [plan.tensors[f"{n}.weight"].sbp for n in ("up", "down")] == [(S(0),), (S(1),)]
    plan = best_plan(regress, PAIR, (model, large, large))
    assert all(layouts.sbp == (B,) for layouts in plan.tensors.values())
    assert plan.modules[""].inputs == {0: (S(0),)}


def test_the_model_and_its_gradients_stay_as_they_are():
    step, model, batch = case("mlp")
    step(model, *batch)
    before = {name: (p, p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    best_plan(step, PAIR, (model, *batch))
    for name, p in model.named_parameters():
        assert p is before[name][0] and p.grad is before[name][1]
        assert torch.equal(p.grad, before[name][2])


def test_a_plan_is_found_again_and_is_kept_by_its_file(tmp_path):
    step, model, batch = case("gpt")
    plans = [best_plan(step, PAIR, (model, *batch), machine=slow(1e6)) for _ in range(2)]
    assert plans[0] == plans[1] and plans[0].notes == plans[1].notes
    loaded = Plan.load(plans[0].save(tmp_path / "plan.yaml"))
    assert plan_for(model, plain_slots(model), PAIR, loaded) == plans[0]


def test_equal_blocks_get_equal_layouts_at_little_cost():
    torch.manual_seed(0)
    model = GPT(layers=12)
    tokens = torch.zeros(4, 6, dtype=torch.long)
    program = record(predict, model, PAIR, (model, tokens, tokens), {})
    problem = problem_of(program, slow(1e6))
    keys = {node.block_key for node in problem.nodes if node.block_key is not None}
    assert len(keys) < len(problem.nodes) / 8
    plan = best_plan(predict, PAIR, (model, tokens, tokens), machine=slow(1e6))
    for name, layouts in plan.tensors.items():
        if name.startswith("blocks."):
            assert layouts == plan.tensors["blocks.0." + name.split(".", 2)[2]]


def test_memory_is_a_bound_and_says_by_how_much_it_is_missed():
    model = MLP(64, 256)
    x = torch.randn(512, 64)
    free = best_plan(regress, PAIR, (model, x, x))
    program = record(regress, model, PAIR, (model, x, x), {})
    memory = int(follow(program, BUILT_IN["cpu"], free).nbytes * 0.8)
    bound = best_plan(regress, PAIR, (model, x, x), memory=memory)
    assert follow(program, BUILT_IN["cpu"], bound).nbytes <= memory
    with pytest.raises(ValueError, match=r"fits in memory=1,000 bytes .*\n.*too many"):
        best_plan(regress, PAIR, (model, x, x), memory=1000)


def test_two_axes_are_searched():
    step, model, batch = case("gpt")
    grid = placement("cpu", ranks=[[0, 1], [2, 3]], axes=("dp", "tp"))
    device = slow(1e6)
    plan = best_plan(step, grid, (model, *batch), machine=device)
    program = record(step, model, grid, (model, *batch), {})
    for given in ({"dp": "data", "tp": "tensor"}, {"dp": "zero3", "tp": "data"}):
        other = plan_for(model, plain_slots(model), grid, given)
        assert follow(program, device, plan).seconds <= follow(program, device, other).seconds


def test_programs_that_read_values_or_lay_out_tensors_are_refused():
    model, x = MLP(), torch.randn(4, 8)
    with pytest.raises(ValueError, match="reads a value"):
        best_plan(lambda m, x: m(x).sum().item(), PAIR, (model, x))
    with pytest.raises(ValueError, match="lays a tensor out itself"):
        best_plan(lambda m, x: m(x).to_global(sbp=S(0)), PAIR, (model, x))
    with pytest.raises(ValueError, match="is given 0: none"):
        best_plan(lambda x: x, PAIR, x)
    with pytest.raises(ValueError, match="is given 2: MLP, MLP"):
        best_plan(lambda a, b, x: b(a(x)), PAIR, (model, MLP(), x))


class Masked(MLP):
    """Looks at its mask and its tokens, as models of transformers do."""

    def forward(self, x, mask, tokens):
        y = super().forward(x)
        if not mask.all() or 0 in tokens[:, [-1, 0]]:
            y = y * mask.unsqueeze(-1)
        return y


@pytest.mark.parametrize("padding, ops", [(False, 0), (True, 1)])
def test_values_of_whole_numbers_in_the_example_are_known(padding, ops):
    model, x, mask = Masked(), torch.randn(4, 8), torch.ones(4, dtype=torch.bool)
    mask[1] = not padding
    tokens = torch.arange(8).reshape(4, 2) + 1
    program = record(model, model, PAIR, (x, mask, tokens), {})
    assert sum(op.name.endswith("mul") for op in program.ops) == ops
    assert best_plan(model, PAIR, (x, mask, tokens)).notes


def test_values_that_were_written_over_are_not_known():
    model, mask = MLP(), torch.ones(4, dtype=torch.bool)

    def step(model, x, mask):
        mask[0] = False
        return model(x) if mask.all() else x

    with pytest.raises(ValueError, match="reads a value"):
        best_plan(step, PAIR, (model, torch.randn(4, 8), mask))


def test_ops_without_a_rule_are_whole():
    model = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    x = torch.randn(2, 4, 9)
    program = record(lambda m, x: m(x).sum().backward(), model, PAIR, (model, x), {})
    assert any(op.row is None for op in program.ops)
    assert best_plan(lambda m, x: m(x).sum().backward(), PAIR, (model, x)).notes


def test_scipy_is_asked_for_where_it_is_missing(monkeypatch):
    found = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "scipy":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install scipy"):
        best_plan(MLP(), PAIR, torch.randn(4, 8))


# -- run for real ----------------------------------------------------------------------------------


def found(name: str, machine: str, grid: list) -> Plan:
    step, model, batch = case(name)
    where = placement("cpu", ranks=grid)
    return best_plan(step, where, (model, *batch), machine=DEVICE[machine])


def run(rank: int, name: str, plan: Plan, grid: list) -> None:
    step, model, batch = case(name)
    model, batch = model.double(), [x.double() if x.is_floating_point() else x for x in batch]
    twin = copy.deepcopy(model)
    expected = step(twin, *batch)
    where = placement("cpu", ranks=grid)
    consistent.parallelize(model, where, plan, inputs=(B,) * where.ndim)
    loss = step(model, *batch)
    torch.testing.assert_close(loss.full(), expected.detach())
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full(), q.grad, msg=lambda m, key=key: f"{key}: {m}")


def search(rank: int) -> tuple[str, list[str]]:
    plan = found("mlp", "slow", [0, 1])
    return str(plan), plan.notes


@pytest.mark.parametrize("machine", ["small", "slow"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_values_and_gradients_are_those_of_one_device(name, machine):
    pool(2).run(run, name, found(name, machine, [0, 1]), [0, 1])


@pytest.mark.parametrize("grid", [[0, 1, 2], [[0, 1], [2, 3]]], ids=["three", "grid"])
def test_values_and_gradients_are_right_on_more_ranks(grid):
    ranks = 3 if len(grid) == 3 else 4
    pool(ranks).run(run, "mlp", found("mlp", "slow", grid), grid)


def test_ranks_find_the_same_plan():
    plans = pool(2).run(search)
    assert plans[0] == plans[1]
