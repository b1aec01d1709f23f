"""Plans with codecs: bytes are the formula, all ranks have the same bits, and a model learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, P, Placement, S, data_parallel, zero1, zero3
from consistent.autograd import coded_sums
from consistent.nn import Layouts, Plan
from consistent.nn.sharded.gathered import GatheredTogether
from mirrored.codecs import CODECS
from mirrored.transports.counting import counting
from tests.consistent.compiled.steps import beside
from tests.mirrored.kinds import over_gloo
from tests.mirrored.transports.several_hosts.kinds import on_hosts
from tests.ranks import ALL, SIZES, on_ranks, pool

STEPS = 500 if ALL else 25
INT8 = zero3(gather="int8", reduce="int8")
FSDP = {"dp": "data", "fsdp": INT8}
DATA = data_parallel(reduce="int8")
HSDP = {"dp": DATA, "fsdp": zero3(gather="bf16")}


def net(dim: int = 20) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(dim, 67), nn.Tanh(), nn.Linear(67, 50), nn.Tanh(), nn.Linear(50, 9)
    )


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Other rows in each step, and targets with noise, so that the loss does not go to zero."""
    rng = torch.Generator().manual_seed(1)
    w = torch.randn(20, 9, generator=rng) / 4
    rng.manual_seed(2 + i)
    x, noise = torch.randn(48, 20, generator=rng), torch.randn(48, 9, generator=rng)
    return x, torch.tanh(x @ w) + noise / 2


def trained(rank: int, n: int, plan: Any, keep: int | None = None, steps: int = STEPS) -> list:
    """[the last loss, the parameters, the parameters as forward sees them]."""
    model: Any = net()
    if plan is not None:
        ranks: Any = list(range(n))
        if isinstance(plan, dict):
            placement = Placement("cpu", [[0, 1], [2, 3]], axes=tuple(plan))
        else:
            placement = Placement("cpu", ranks)
        consistent.parallelize(model, placement, plan, keep_bytes=keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss: Any = None
    for i in range(steps):
        x, y = batch(i)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if plan is None:
        return [loss.detach()]
    seen: list[torch.Tensor] = []
    hook = model[4].register_forward_pre_hook(
        lambda m, args: seen.extend(p.detach().full() for p in (m.weight, m.bias))
    )
    model(batch(0)[0])
    hook.remove()
    return [loss.detach().full(), [p.detach().full() for p in model.parameters()], seen]


def same(found: list, other: list) -> bool:
    return all(map(torch.equal, [found[0], *found[1], *found[2]], [other[0], *other[1], *other[2]]))


@pytest.mark.parametrize("n", SIZES)
def test_parameters_are_equal_on_all_ranks_and_the_loss_is_near(n: int) -> None:
    plain = trained(0, 1, None)[0]
    plans: list[Any] = [INT8, DATA] if n < 4 else [FSDP, HSDP]
    if ALL:
        plans = [INT8, DATA, zero1(reduce="fp8"), zero3(gather="bf16", reduce="bf16")]
        plans += [FSDP, HSDP] if n == 4 else []
    for plan in plans:
        found = pool(n).run(trained, n, plan)
        assert all(same(each, found[0]) for each in found), plan
        assert abs(found[0][0] - plain) < 0.005 * plain, (plan, found[0][0], plain)


def test_bits_of_gradients_do_not_depend_on_where_ranks_are() -> None:
    low = data_parallel(reduce="powersgd:2"), zero3(reduce="powersgd:2:int8")
    for plan in (DATA, *low, zero1(reduce="bf16")):
        together = pool(3).run(trained, 3, plan, None, 3)
        apart = pool(3).run(over_gloo, trained, 3, plan, None, 3)
        mixed = on_hosts("aab", trained, 3, plan, None, 3)
        assert all(same(each, together[0]) for each in (*together, *apart, *mixed)), plan


def test_bits_do_not_depend_on_where_ranks_are_nor_on_when_parameters_are_gathered() -> None:
    steps = 3
    together = pool(4).run(trained, 4, INT8, None, steps)[0]
    one_by_one = pool(4).run(trained, 4, INT8, 0, steps)[0]
    apart = pool(4).run(over_gloo, trained, 4, INT8, 0, steps)[0]
    mixed = on_hosts("aabb", trained, 4, INT8, 0, steps)[0]
    for other in (one_by_one, apart, mixed):
        assert same(together, other)


def one_step_bytes(rank: int, n: int, plan: Any) -> tuple[int, int]:
    """What this rank sends in the gathers, and in the sums, of a step."""
    model: Any = consistent.parallelize(
        nn.Linear(515, 70, bias=False), Placement("cpu", range(n)), plan
    )
    x = consistent.distribute(torch.randn(4, 515), model.weight.placement, B)
    with counting() as log:
        y = model(x)
    gathered = log.bytes
    y = y.sum()
    with counting() as log:
        y.backward()
    return gathered, log.bytes


def test_bytes_are_the_formula() -> None:
    for n in SIZES:
        rows = [70 // n + (k < 70 % n) for k in range(n)]
        for gather, reduce in (("int8", "int8"), ("bf16", "fp8"), ("fp8", "bf16")):
            found = pool(n).run(one_step_bytes, n, zero3(gather=gather, reduce=reduce))
            for rank, (gathered, summed) in enumerate(found):
                own = CODECS[gather].nbytes(rows[rank] * 515)
                others = sum(
                    CODECS[reduce].nbytes(r * 515) for k, r in enumerate(rows) if k != rank
                )
                assert (gathered, summed) == ((n - 1) * own, others)
        plain = pool(n).run(one_step_bytes, n, "zero3")
        coded = pool(n).run(one_step_bytes, n, INT8)
        for a, b in zip(coded, plain, strict=True):
            assert all(0.25 < x / y < 0.26 for x, y in zip(a, b, strict=True))


def sum_bytes(rank: int, n: int, reduce: str) -> int:
    """What this rank sends of a gradient of 70 x 515 and one of 70, which is as short as it is."""
    model: Any = nn.Linear(515, 70)
    consistent.parallelize(model, Placement("cpu", range(n)), data_parallel(reduce=reduce))
    y = model(torch.randn(4, 515)).sum()
    with counting() as log:
        y.backward()
    return log.bytes


def test_bytes_of_sums_are_the_formula() -> None:
    for n in SIZES:
        for name in ("int8", "bf16"):
            for rank, sent in enumerate(pool(n).run(sum_bytes, n, name)):
                found = 0
                for total in (70 * 515, 70):
                    parts = [total // n + (k < total % n) for k in range(n)]
                    found += sum(CODECS[name].nbytes(x) for x in parts) - CODECS[name].nbytes(
                        parts[rank]
                    )
                    found += (n - 1) * CODECS[name].nbytes(parts[rank])
                assert sent == found


def low_rank_bytes(rank: int, n: int, plan: Any) -> tuple[int, int]:
    model: Any = nn.Linear(1024, 1100, bias=False)
    consistent.parallelize(model, Placement("cpu", range(n)), plan)
    y = model(torch.randn(4, 1024)).sum()
    with counting() as log:
        y.backward()
    return log.bytes, 1100 * 1024 * 4 * (n - 1) // n


def test_a_sum_of_low_rank_sends_two_thin_matrices() -> None:
    coded = sum(2 * CODECS["int8"].nbytes(16 * n // 2) for n in (1024, 1100))  # there and back
    for reduce, wanted in (("powersgd:4", (1024 + 1100) * 4 * 4), ("powersgd:16:int8", coded)):
        for make in (zero3, data_parallel):
            for sent, plain in pool(2).run(low_rank_bytes, 2, make(reduce=reduce)):
                assert sent == wanted <= 0.05 * plain


def reported(rank: int, n: int, plan: Any) -> tuple[int, int, str]:
    """(bytes that the report says, bytes that went, its text) of a step."""
    model: Any = consistent.parallelize(
        nn.Linear(1024, 512, bias=False), Placement("cpu", range(n)), plan
    )
    x = consistent.distribute(torch.randn(4, 1024), model.weight.placement, B)
    with consistent.report() as report, counting() as log:
        model(x).sum().backward()
    return sum(line.nbytes for line in report.lines), log.bytes, str(report)


@pytest.mark.parametrize("reduce", ["int8", "powersgd:4", "powersgd:4:fp8"])
def test_a_report_says_the_bytes_that_are_sent(reduce: str) -> None:
    for plan in (data_parallel(reduce=reduce), zero3(gather="bf16", reduce=reduce)):
        for ways in ((over_gloo, reported), (reported,)):
            for said, sent, text in pool(2).run(*ways, 2, plan):
                assert said == sent, (plan, said, sent, text)
                assert f"(0) by {reduce}->" in text


# ---- what codecs leave out -----------------------------------------------------------------------


def coder(model: Any) -> Any:
    if found := coded_sums.coder_of(next(model.parameters())):
        return found
    (hook,) = (h.__self__ for h in model._forward_pre_hooks.values()
               if isinstance(getattr(h, "__self__", None), GatheredTogether))  # fmt: skip
    return hook.parameters[0].coder


def as_it_is(ranks: Placement, plan: Any) -> Any:
    return consistent.parallelize(nn.Linear(40, 30, bias=False), ranks, plan)


def unfrozen(ranks: Placement, plan: Any) -> Any:
    """Frozen when it is laid out, and at its first call."""
    model: Any = nn.Linear(40, 30, bias=False).requires_grad_(False)
    consistent.parallelize(model, ranks, plan)
    model(torch.randn(3, 40))
    return model.requires_grad_()


def copied(ranks: Placement, plan: Any) -> Any:
    return copy.deepcopy(as_it_is(ranks, plan))


def given_memory_later(ranks: Placement, plan: Any) -> Any:
    with torch.device("meta"):
        model = nn.Linear(40, 30, bias=False)
    return consistent.parallelize(model, ranks, plan, initialise=True)


REDUCES = ["int8", "bf16", "powersgd:2", "powersgd:2:int8"]


@pytest.mark.parametrize("make", [zero3, zero1, data_parallel])
@pytest.mark.parametrize("reduce", REDUCES)
@on_ranks(3)
def test_what_is_not_sent_is_sent_later(rank: int, reduce: str, make: Any) -> None:
    """All that was sent and what is kept are all gradients."""
    ranks = Placement("cpu", range(3))
    others = [unfrozen, copied, given_memory_later]
    turn = REDUCES.index(reduce) % len(others)
    for begin in (as_it_is, *(others if ALL else others[turn : turn + 1])):
        model, exact = begin(ranks, make(reduce=reduce)), as_it_is(ranks, "zero3")
        for step in range(3):
            torch.manual_seed(step)
            x, y = (consistent.distribute(torch.randn(9, k), ranks, S(0)) for k in (40, 30))
            for m in (model, exact):
                (m(x) * y).sum().backward()
        kept = consistent.from_local(coder(model).unsent.view(30, 40), ranks, P).full()
        assert kept.abs().max() > 0, begin
        torch.testing.assert_close(
            model.weight.grad.full() + kept, exact.weight.grad.full(), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("make", [zero3, data_parallel])
@pytest.mark.parametrize("reduce", ["int8", "powersgd:2"])
@on_ranks(2)
def test_what_is_not_sent_of_short_floats_is_kept_in_float32(
    rank: int, reduce: str, make: Any
) -> None:
    """In their own dtype, what is small beside the next gradient would be rounded away."""
    ranks = Placement("cpu", range(2))
    for dtype in (torch.bfloat16, torch.float16):
        made = nn.Linear(40, 30, bias=False).to(dtype)
        model: Any = consistent.parallelize(made, ranks, make(reduce=reduce))
        for _ in range(2):
            model(torch.randn(8, 40, dtype=dtype)).sum().backward()
        assert model.weight.grad.dtype is dtype and coder(model).unsent.dtype is torch.float32


@pytest.mark.parametrize("make", [zero3, data_parallel])
@pytest.mark.parametrize("reduce", ["int8", "powersgd:2", "powersgd:2:int8"])
@on_ranks(2)
def test_a_gradient_that_overflows_is_seen_and_spoils_no_other(
    rank: int, reduce: str, make: Any
) -> None:
    ranks = Placement("cpu", range(2))
    model: Any = consistent.parallelize(nn.Linear(40, 30, bias=False), ranks, make(reduce=reduce))
    for bad in (None, torch.inf, None, torch.nan, None):
        model.zero_grad()
        x = torch.randn(8, 40)
        x[0, 0] = 1.0 if bad is None else bad
        model(x).sum().backward()
        assert bool(model.weight.grad.full().isfinite().all()) is (bad is None)


@pytest.mark.parametrize("make", [zero3, data_parallel])
@on_ranks(2)
def test_gradients_that_are_only_asked_for_are_exact(rank: int, make: Any) -> None:
    ranks = Placement("cpu", range(2))
    model: Any = consistent.parallelize(nn.Linear(40, 30), ranks, make(reduce="int8"))
    exact: Any = consistent.parallelize(net_of(model), ranks, make())
    x = torch.randn(8, 40)
    for create in (False, True):
        a: Any
        b: Any
        a, b = (
            torch.autograd.grad((m(x) ** 2).sum(), list(m.parameters()), create_graph=create)
            for m in (model, exact)
        )
        assert all(torch.equal(g.full(), h.full()) for g, h in zip(a, b, strict=True))
    assert not coder(model).unsent.any()


def net_of(model: Any) -> nn.Module:
    made = nn.Linear(40, 30)
    made.load_state_dict({k: v.full() for k, v in model.state_dict().items()})
    return made


@on_ranks(2)
def test_inside_no_sync_nothing_is_sent_and_one_sum_is_coded(rank: int) -> None:
    ranks = Placement("cpu", range(2))
    model: Any = consistent.parallelize(nn.Linear(512, 64, bias=False), ranks, INT8)
    with consistent.no_sync():
        model(torch.randn(3, 512)).sum().backward()
    y = model(torch.randn(3, 512)).sum()
    with counting() as log:
        y.backward()
    assert log.bytes == CODECS["int8"].nbytes(32 * 512)


@on_ranks(2)
def test_sums_inside_no_sync_and_of_several_backwards_are_coded_once_each(rank: int) -> None:
    ranks = Placement("cpu", range(2))
    model: Any = consistent.parallelize(nn.Linear(512, 64, bias=False), ranks, DATA)
    x = torch.randn(3, 512)
    with consistent.no_sync():
        model(x).sum().backward()
    for time in (1, 2):
        y = model(x).sum()
        with counting() as log:
            y.backward()
        assert log.bytes == 2 * CODECS["int8"].nbytes(32 * 512)
        found, wanted = model.weight.grad.full(), (1 + time) * x.sum(0).expand(64, -1)
        assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()


@on_ranks(2)
def test_a_plan_without_codecs_takes_them_away(rank: int) -> None:
    ranks = Placement("cpu", range(2))
    model: Any = consistent.parallelize(nn.Linear(40, 30), ranks, DATA)
    model(torch.randn(3, 40)).sum().backward()
    assert coded_sums.coder_of(model.weight) is not None
    consistent.move(model, None, ranks, "data")
    assert coded_sums.coder_of(model.weight) is None


@pytest.mark.parametrize("plan", [INT8, DATA])
@on_ranks(2)
def test_a_copy_begins_with_nothing_kept(rank: int, plan: Any) -> None:
    model: Any = consistent.parallelize(nn.Linear(40, 30), Placement("cpu", range(2)), plan)
    model(torch.randn(3, 40)).sum().backward()
    other = copy.deepcopy(model)
    other(torch.randn(3, 40)).sum().backward()
    assert coder(other) is not coder(model)


# ---- steps as programs ---------------------------------------------------------------------------


def step_of(plan: Any) -> Any:
    def make() -> Any:
        model: Any = consistent.parallelize(net().double(), Placement("cpu", range(2)), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [model, optimizer]

    return make


COMPILED = [INT8, zero3(gather="fp8", reduce="powersgd:2"), DATA, zero1(reduce="powersgd:2:fp8")]


@pytest.mark.parametrize("plan", COMPILED)
@on_ranks(2)
def test_a_compiled_step_does_as_the_step(rank: int, plan: Any) -> None:
    batches = [tuple(x.double() for x in batch(i)) for i in range(4)]
    beside(step_of(plan), batches)


# ---- plans and their errors ----------------------------------------------------------------------


def test_a_plan_with_codecs_is_saved_printed_and_loaded(tmp_path: Any) -> None:
    plan = Plan(
        {"*.weight": Layouts((B, S(0)), use=(B, B), gather=(None, "int8"), reduce="-, bf16")}
    )
    assert plan.tensors["*.weight"].reduce == (None, "bf16")
    assert Plan.load(plan.save(tmp_path / "plan.yaml")) == plan
    assert "gather by" in str(plan) and "(-, int8)" in str(plan)
    one = Plan({"*": {"sbp": S(0), "use": B, "reduce": "powersgd:4"}})
    assert (
        Plan.load(one.save(tmp_path / "plan.yaml")) == one != Plan({"*": {"sbp": S(0), "use": B}})
    )


def error(rank: int, make: Any, plan: Any, ranks: Any) -> str:
    with pytest.raises(ValueError) as caught:
        consistent.parallelize(make(), Placement("cpu", ranks), plan)
    return str(caught.value)


def integers() -> nn.Module:
    made = nn.Module()
    made.table = nn.Parameter(torch.arange(8), requires_grad=False)
    return made


def complexes() -> nn.Module:
    made = nn.Module()
    made.table = nn.Parameter(torch.zeros(8, dtype=torch.complex64))
    return made


def linear() -> nn.Module:
    return nn.Linear(8, 8)


GRID = [[0, 1], [2, 3]]
FAULTS: list[tuple[Any, Any, Any, str]] = [
    (integers, INT8, range(4), "int64"),
    (complexes, INT8, range(4), "complex64"),
    (linear, zero3(gather="int4"), range(4), "no codec 'int4' for gather"),
    (linear, zero3(gather="powersgd:4"), range(4), "no codec 'powersgd:4' for gather"),
    (linear, zero3(reduce="powersgd:0"), range(4), "no codec 'powersgd:0'"),
    (linear, zero3(reduce="powersgd:2:int4"), range(4), "no codec 'powersgd:2:int4'"),
    (linear, {"*": Layouts((B,), gather="int8")}, range(4), "not gathered along axis 0"),
    (linear, {"*": Layouts((B,), grad=(S(0),), reduce="int8")}, range(4), "not gathered along"),
    (linear, {"*": Layouts((B, B), reduce=("int8", "bf16"))}, GRID, "codecs along 2 axes"),
    (linear, data_parallel(reduce="int4"), range(4), "no codec 'int4' for reduce"),
    (linear, {"*": Layouts((S(0), P), use=(B, P), gather=("int8", None))}, GRID, "it lies as P"),
    (linear, {"*": Layouts((P,), use=(B,), gather="int8")}, range(4), "it lies as P"),
    (linear, {"*": Layouts((S(0), S(0)), use=(B, B), gather=("int8", None))}, GRID, "along 2 axes"),
]


def faults(rank: int) -> list[str]:
    return [error(rank, make, plan, ranks) for make, plan, ranks, _ in FAULTS]


def test_what_no_codec_rounds_raises_on_every_rank() -> None:
    for said in pool(4).run(faults):
        for text, (*_, wanted) in zip(said, FAULTS, strict=True):
            assert wanted in text and "parallelize: " in text, text


@on_ranks(2)
def test_one_rank_and_numbers_as_short_as_the_codec_need_none(rank: int) -> None:
    model: Any = consistent.parallelize(nn.Linear(8, 8), Placement("cpu", [0]), INT8)
    assert not model._forward_pre_hooks
    short = nn.Linear(8, 8).bfloat16()
    model = consistent.parallelize(short, Placement("cpu", range(2)), zero3(gather="bf16"))
    assert coder(model) is None
