"""Layouts chosen for all ops of a step at once: values and gradients are eager's, and less is sent
than where each op chooses alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.compiled.layout_search import trial
from tests.consistent.compiled.steps import beside
from tests.consistent.compiled.test_steps import batches as tokens
from tests.consistent.compiled.test_steps import planned
from tests.ranks import on_ranks, pool
from tests.twins import randn

CALLS = 6


def leaf(*sizes: int, seed: int, sbp: Any) -> nn.Parameter:
    return nn.Parameter(consistent.distribute(randn(*sizes, seed=seed), Placement.all("cpu"), sbp))


def chain(wide: int, narrow: int) -> Any:
    """Two products in a row. The first weight is a little smaller than the input, so that the
    first product alone gathers it; both weights together are larger than the input."""

    def make() -> Any:
        up = leaf(wide, narrow, seed=7, sbp=S(1))
        down = leaf(narrow, wide, seed=8, sbp=S(0))
        optim = torch.optim.SGD([up, down], lr=0.01)

        def step(x: Any) -> Any:
            optim.zero_grad()
            loss = (torch.relu(x @ up) @ down).square().mean()
            loss.backward()
            optim.step()
            return loss, up.grad, down.grad

        return step, [up, down]

    return make


def batches(rows: int, wide: int) -> list[tuple]:
    p = Placement.all("cpu")
    return [(consistent.distribute(randn(rows, wide, seed=i), p, S(0)),) for i in range(CALLS)]


@on_ranks(2, 3)
def test_a_chain_sends_less_than_its_ops_alone(rank: int) -> None:
    for rows, wide, narrow in ((72, 48, 60), (71, 49, 61)):
        alone = beside(chain(wide, narrow), batches(rows, wide))
        both = beside(chain(wide, narrow), batches(rows, wide), layouts="auto")
        before, after = alone.programs[0].program, both.programs[0].program
        assert len(both.programs) == 1
        assert after.bytes < before.bytes
        # Both weights are gathered, and their gradients scattered; or the input and the results.
        assert [c.kind for c in before.messages()] == ["all_gather_into_tensor"] * 2 + [
            "reduce_scatter"
        ] * 2
        assert [c.kind for c in after.messages()] == [
            "all_gather_into_tensor",
            "reduce_scatter",
            "all_gather_into_tensor",
        ]
        text = both.show()
        assert "layouts: of 5 ops chosen together" in text
        assert "f64" + f"[{rows}, {narrow}] S(0)" in alone.show()
        assert "f64" + f"[{rows}, {narrow}] S(1)" in text


@on_ranks(4)
def test_a_chain_on_two_axes(rank: int) -> None:
    p = Placement("cpu", [[0, 1], [2, 3]], axes=("a", "b"))
    sbp = (S(0), S(0)), (B, S(1)), (B, S(0))

    def make() -> Any:
        up, down = (
            nn.Parameter(consistent.distribute(randn(*sizes, seed=seed), p, sbp[seed]))
            for seed, sizes in ((1, (24, 30)), (2, (30, 24)))
        )

        def step(x: Any) -> Any:
            up.grad = down.grad = None
            loss = (torch.relu(x @ up) @ down).square().mean()
            loss.backward()
            return loss

        return step, [up, down]

    given = [(consistent.distribute(randn(72, 24, seed=i), p, sbp[0]),) for i in range(CALLS)]
    before = beside(make, given).programs[0].program
    made = beside(make, given, layouts="auto")
    assert made.programs[0].program.bytes < before.bytes, made.show()


@on_ranks(2)
def test_autocast_is_followed(rank: int) -> None:
    def make() -> Any:
        up, down = leaf(48, 60, seed=7, sbp=S(1)), leaf(60, 48, seed=8, sbp=S(0))

        def step(x: Any) -> Any:
            up.grad = down.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                h = torch.relu(x @ up) @ down
            loss = h.double().square().mean()
            loss.backward()
            return loss

        return step, [up, down]

    torch.manual_seed(3)
    step, leaves = make()
    made: Any = consistent.compile(step, backend="ops", fullgraph=True, layouts="auto")
    for (x,) in batches(72, 48):
        loss, grads = step(x), [y.grad.full() for y in leaves]
        found = made(x)
        torch.testing.assert_close(found.full(), loss.full(), rtol=0.02, atol=0.01)
        for y, grad in zip(leaves, grads, strict=True):
            torch.testing.assert_close(y.grad.full(), grad, rtol=0.05, atol=0.05)
    assert "layouts: " in made.show(), made.show()


@on_ranks(2)
def test_what_chooses_best_alone_stays(rank: int) -> None:
    made = beside(chain(48, 60), batches(400, 48), layouts="auto")
    assert len(made.programs) == 1
    assert "layouts: op by op, for " in made.show()


@on_ranks(2)
def test_what_the_step_returns_or_looks_at_keeps_its_layout(rank: int) -> None:
    p = Placement.all("cpu")
    up, down = leaf(48, 60, seed=7, sbp=S(1)), leaf(60, 48, seed=8, sbp=S(0))
    kept: dict[str, Any] = {"h": None}

    def looks(x: Any) -> Any:
        h = torch.relu(x @ up)
        return (h.to_local() @ down.to_local().new_ones(60, 2)).sum(), (h @ down).square().mean()

    def returns(x: Any) -> Any:
        h = torch.relu(x @ up)
        return h, (h @ down).square().mean()

    def keeps(x: Any) -> Any:
        kept["h"] = torch.relu(x @ up)
        return (kept["h"] @ down).square().mean()

    def moves(x: Any) -> Any:
        h = torch.relu(x @ up).to_global(sbp=S(0))
        return h.sbp == (S(0),), (h @ down).square().mean()

    for step in (looks, returns, keeps, moves):
        made: Any = consistent.compile(backend="ops", fullgraph=True, layouts="auto")(
            torch.no_grad()(step)
        )
        for i in range(CALLS):
            x = consistent.distribute(randn(72, 48, seed=i), p, S(0))
            with torch.no_grad():
                wanted = step(x)
                h = kept["h"]
            found = made(x)
            pairs = [(wanted, found), *([(h, kept["h"])] if step is keeps else ())]
            for want, have in pairs:
                many = isinstance(want, tuple)
                for a, b in zip(want if many else [want], have if many else [have], strict=True):
                    if isinstance(a, consistent.GlobalTensor):
                        assert a.sbp == b.sbp, step.__name__
                        a, b = a.full(), b.full()
                    torch.testing.assert_close(b, a)
        assert len(made.programs) == 1


@on_ranks(2)
def test_checkpoints_are_left_as_they_are(rank: int) -> None:
    from torch.utils.checkpoint import checkpoint

    def make() -> Any:
        up, down = leaf(48, 60, seed=7, sbp=S(1)), leaf(60, 48, seed=8, sbp=S(0))

        def step(x: Any) -> Any:
            up.grad = down.grad = None
            h = checkpoint(lambda x: torch.relu(x @ up), x, use_reentrant=False)
            loss = (h @ down).square().mean()
            loss.backward()
            return loss

        return step, [up, down]

    made = beside(make, batches(72, 48), layouts="auto")
    assert "op by op, for backward runs global ops" in made.show()


def _plan(rank: int, plan: Any, axes: int, sbp: Any) -> str:
    p, make = planned(plan, axes)
    made = beside(make, tokens(7, (p, sbp)), layouts="auto")
    assert len(made.programs) == 1
    (note,) = made.programs[0].program.notes
    return note


PLANS = [
    ("data", 1, 2, S(0)), ("zero3", 1, 3, S(0)), ("tensor", 1, 2, B),
    ({"*weight": S(0), "*": B}, 1, 3, S(0)), ({"table.weight": S(1), "*": B}, 1, 2, B),
    ({"a": "data", "b": "tensor"}, 2, 4, (S(0), B)),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "axes", "ranks", "sbp"), PLANS)
def test_models_under_plans(plan: Any, axes: int, ranks: int, sbp: Any) -> None:
    notes = pool(ranks).run(_plan, plan, axes, sbp)
    assert len(set(notes)) == 1, notes
    assert notes[0].startswith("layouts: "), notes


@on_ranks(2)
def test_a_graph(rank: int) -> None:
    up, down = leaf(48, 60, seed=7, sbp=S(1)), leaf(60, 48, seed=8, sbp=S(0))

    class Train(consistent.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.add_optimizer(torch.optim.SGD([up, down], lr=0.0))

        def build(self, x: Any) -> Any:
            loss = (torch.relu(x @ up) @ down).square().mean()
            loss.backward()
            return loss

    graph = Train()
    graph.config.enable_compile(backend="ops", layouts="auto")
    for (x,) in batches(72, 48):
        wanted = (torch.relu(x @ up) @ down).square().mean()
        torch.testing.assert_close(graph(x).full(), wanted.full())
    assert "chosen together" in graph.show()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="layouts is 'best'"):
        consistent.compile(lambda x: x, layouts="best")


@on_ranks(2)
def test_what_the_chooser_meets_every_rank_raises(rank: int) -> None:
    def broken(chain: Any) -> Any:
        raise KeyError("no solver")

    step, _ = chain(48, 60)()
    made = consistent.compile(step, backend="ops", layouts="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "choose_layouts", broken)
        with pytest.raises(RuntimeError, match="(?s)layouts are chosen by rank 0.*no solver"):
            for each in batches(72, 48):
                made(*each)


WRITES = {
    "itself": lambda h: h.add_(1.0),
    "transposed": lambda h: h.t().add_(0.5),
    "split": lambda h: h.view(-1, 4, 15).mul_(0.5),
    "flat": lambda h: h.view(-1).add_(1.0),
    "columns": lambda h: h[:, 3:9].zero_(),
    "rows": lambda h: h[1:5].fill_(0.25),
}


def writing(name: str) -> Any:
    """Two products, between which the step writes into the result of the first, or a view of it."""

    def make() -> Any:
        up = leaf(48, 60, seed=7, sbp=S(1))
        down = leaf(60, 48, seed=8, sbp=S(0))
        optim = torch.optim.SGD([up, down], lr=0.01)

        def step(x: Any) -> Any:
            optim.zero_grad()
            h = (x @ up) * 2.0
            WRITES[name](h)
            loss = (h @ down).square().mean()
            loss.backward()
            optim.step()
            return loss, up.grad, down.grad

        return step, [up, down]

    return make


@on_ranks(2)
def test_what_is_written_in_place_is_not_written_to_a_copy(rank: int) -> None:
    found = [beside(writing(name), batches(72, 48), layouts="auto") for name in WRITES]
    notes = [made.programs[0].program.notes[0] for made in found]
    assert any("chosen together" in note for note in notes), notes
