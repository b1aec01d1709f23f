"""Plans that are found can be run: modules whose tensors are cut, on several mesh axes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, placement
from consistent.cost_model.built_in import BUILT_IN
from consistent.nn.plan import Plan
from consistent.nn.planners.layout_search import best_plan, search
from tests.consistent.nn.planners.test_layout_search import slow
from tests.ranks import ALL, pool

pytest.importorskip("scipy")

MACHINES = {"built-in": BUILT_IN["cpu"], "slow": slow(1e6), "slow memory": slow(1e9)}
GRIDS = {"pair": [0, 1], "grid": [[0, 1], [2, 3]], "row": [[0, 1, 2, 3]], "column": [[0], [1]]}


class Attention(nn.Module):
    """Queries, keys and values of one projection, taken apart in one of several ways."""

    def __init__(self, way: str, width: int = 16, heads: int = 4, shared: int = 1) -> None:
        super().__init__()
        self.way, self.heads, self.shared = way, heads, shared
        self.sizes = [width, width // shared, width // shared]
        self.qkv, self.proj = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        made = self.qkv(x)
        if self.way == "view":
            q, k, v = made.view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = made.chunk(3, -1) if self.way == "chunk" else made.split(self.sizes, -1)
            counts = (self.heads, self.heads // self.shared, self.heads // self.shared)
            q, k, v = (p.view(b, s, n, -1).transpose(1, 2) for p, n in zip(parts, counts))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared > 1)
        return x + self.proj(a.transpose(1, 2).reshape(b, s, width))


class Gated(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Rows(nn.Module):
    """A weight in the order of rows, as GPT-2 has it, and a bias that is cut with it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(width, 3 * width))
        self.bias = nn.Parameter(torch.randn(3 * width))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = torch.addmm(self.bias, x.flatten(0, 1), self.weight).split(x.shape[-1], -1)
        return self.out(torch.tanh(a) * b + c).view_as(x)


MODELS = {
    "chunk": lambda: nn.Sequential(Attention("chunk"), Gated()),
    "split": lambda: nn.Sequential(Attention("split"), Rows()),
    "view": lambda: nn.Sequential(Attention("view"), Gated()),
    "shared heads": lambda: nn.Sequential(Attention("split", shared=2), Gated()),
    "narrow": lambda: nn.Sequential(Attention("chunk", 4, 2), Rows(4), Gated(4)),
    "rows": lambda: nn.Sequential(Rows(), Rows(), Gated()),
}


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    width = 4 if name == "narrow" else 16
    return MODELS[name]().double(), torch.randn(4, 6, width, dtype=torch.float64)


def run(rank: int, name: str, grid: list, plan: Plan) -> None:
    model, x = case(name)
    twin = copy.deepcopy(model)
    expected = step(twin, x)
    where = placement("cpu", ranks=grid)
    consistent.parallelize(model, where, plan, inputs=(B,) * where.ndim)
    torch.testing.assert_close(step(model, x).full(), expected.detach())
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full(), q.grad, msg=lambda m, key=key: f"{key}: {m}")


# Each model on two axes of two and on one of the other grids, with two machines; each grid with two
# machines or all.
CASES = [
    (name, grid, machine)
    for i, name in enumerate(MODELS)
    for j, grid in enumerate(GRIDS)
    for k, machine in enumerate(MACHINES)
    if ALL or (i + j + i // 3) % len(MACHINES) == k and (grid == "grid" or i % 3 == (0, 0, 1, 2)[j])
]


@pytest.mark.parametrize(("name", "grid", "machine"), CASES)
def test_a_plan_of_a_module_with_cut_tensors_runs(name: str, grid: str, machine: str) -> None:
    model, x = case(name)
    ranks = GRIDS[grid]
    where = placement("cpu", ranks=ranks)
    plan = best_plan(step, where, (model, x), machine=MACHINES[machine])
    pool(where.size).run(run, name, ranks, plan)


def test_gpt2_finds_a_plan_on_a_grid() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    )
    tokens = torch.randint(64, (4, 8))
    grid = placement("cpu", ranks=[[0, 1], [2, 3]])
    for machine in MACHINES.values() if ALL else [MACHINES["slow"]]:
        plan = best_plan(
            lambda m, t: m(input_ids=t, labels=t).loss.backward(),
            grid,
            (model, tokens),
            machine=machine,
        )
        assert plan.tensors


def test_where_no_plan_can_be_followed_nothing_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "estimate_plans", lambda *_: ({}, {}))
    model, x = case("rows")
    plan = best_plan(step, placement("cpu", ranks=[0, 1]), (model, x))
    assert plan.notes[0].startswith("searched: whole") and not plan.modules
    assert all(layouts.sbp == (B,) for layouts in plan.tensors.values())
