"""Random ops on global tensors: the same bits under every layout and number of ranks, with the
right distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import init

import consistent
from consistent import B, P, Placement, S
from consistent.dispatch.plans.plan import clear_plans
from consistent.forms.random import generator
from consistent.rules import find_row
from mirrored.transports.counting import counting
from tests.ranks import on_ranks, pool

LAYOUTS = (B, S(0), S(1))


def _placement(n: int) -> Placement:
    return Placement("cpu", range(n))


def _run(rank: int, n: int, name: str) -> list[torch.Tensor]:
    """Values (and the gradient, if any) of a case under each layout."""
    found: list[torch.Tensor] = []
    for sbp in LAYOUTS:
        torch.manual_seed(11)
        result = CASES[name](_placement(n), sbp)
        found += [t.full() for t in (result if isinstance(result, tuple) else (result,))]
    return found


def _filled(fill: Callable[[Any], Any], shape: tuple[int, ...] = (7, 5)) -> Callable[..., Any]:
    """A case: an empty tensor filled by one of torch.nn.init's functions or by a method."""

    def case(placement: Placement, sbp: Any) -> Any:
        x = consistent.empty(shape, placement=placement, sbp=sbp)
        fill(x)
        assert x.sbp == (sbp,), "filling in place keeps the layout"
        return x

    return case


def _applied(op: Callable[[Any], Any], shape: tuple[int, ...] = (7, 6, 4)) -> Callable[..., Any]:
    """A case: an op of a tensor, and the tensor's gradient."""

    def case(placement: Placement, sbp: Any) -> Any:
        x = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x = consistent.distribute(x, placement, sbp).requires_grad_()
        y = op(x)
        if not y.requires_grad:
            return y.double()
        y.square().sum().backward()
        return y, x.grad

    return case


INITS: dict[str, Callable[..., Any]] = {
    "constant": _filled(lambda x: init.constant_(x, 0.5)),
    "dirac": _filled(init.dirac_, (7, 5, 3)),
    "eye": _filled(init.eye_),
    "kaiming_normal": _filled(init.kaiming_normal_),
    "kaiming_uniform": _filled(lambda x: init.kaiming_uniform_(x, a=math.sqrt(5))),
    "normal": _filled(lambda x: init.normal_(x, 1.0, 0.5)),
    "ones": _filled(init.ones_),
    "orthogonal": _filled(init.orthogonal_),
    "orthogonal_wide": _filled(init.orthogonal_, (5, 7)),
    "sparse": _filled(lambda x: init.sparse_(x, 0.4)),
    "trunc_normal": _filled(init.trunc_normal_),
    "trunc_normal_far": _filled(lambda x: init.trunc_normal_(x, std=1.0, a=1.5, b=4.0)),
    "uniform": _filled(lambda x: init.uniform_(x, -1.0, 1.0)),
    "xavier_normal": _filled(init.xavier_normal_),
    "xavier_uniform": _filled(init.xavier_uniform_),
    "zeros": _filled(init.zeros_),
}
OPS: dict[str, Callable[..., Any]] = {
    "alpha_dropout": _applied(lambda x: F.alpha_dropout(x, 0.3, True)),
    "bernoulli": _applied(lambda x: torch.bernoulli(x.detach())),
    "dropout": _applied(lambda x: F.dropout(x, 0.3)),
    "dropout_inplace": _applied(lambda x: F.dropout(x * 2, 0.3, inplace=True)),
    "dropout2d": _applied(lambda x: F.dropout2d(x, 0.3)),
    "exponential": _filled(lambda x: x.exponential_()),
    "fractional_max_pool": _applied(lambda x: F.fractional_max_pool2d(x, 2, 3), (7, 6, 5, 5)),
    "geometric": _filled(lambda x: x.geometric_(0.2)),
    "gumbel_softmax": _applied(lambda x: F.gumbel_softmax(x, tau=0.7)),
    "log_normal": _filled(lambda x: x.log_normal_()),
    "multinomial": _applied(lambda x: torch.multinomial(x.detach()[:, :, 0], 3)),
    "normal_of_tensors": _applied(lambda x: torch.normal(x.detach(), 2.0)),
    "poisson": _applied(lambda x: torch.poisson(5 * x.detach())),
    "rand_like": _applied(lambda x: torch.rand_like(x)),
    "rrelu": _applied(lambda x: F.rrelu(x - 0.5, training=True)),
    "standard_gamma": _applied(lambda x: torch._standard_gamma(x)),
}
CASES = {**INITS, **OPS}


@pytest.mark.parametrize("name", CASES)
def test_values_do_not_depend_on_layout_or_ranks(name: str) -> None:
    alone = _run(0, 1, name)
    per_layout = len(alone) // len(LAYOUTS)
    for n in (2, 3):
        for found in pool(n).run(_run, n, name):
            for i, value in enumerate(found):
                want = alone[i % per_layout]
                if name.startswith(("gumbel", "rrelu", "alpha")) or (
                    i % per_layout and per_layout > 1
                ):
                    torch.testing.assert_close(value, want)  # arithmetic around the random values
                else:
                    assert torch.equal(value, want), (
                        f"{name} on {n} ranks, layout {LAYOUTS[i // per_layout]}"
                    )


def _partial(rank: int, n: int) -> list[torch.Tensor]:
    torch.manual_seed(11)
    x = consistent.zeros(7, 5, placement=_placement(n), sbp=P).normal_()
    y = F.dropout(consistent.ones(7, 5, placement=_placement(n), sbp=P), 0.3)
    assert x.sbp == (P,) and y.sbp == (P,)
    return [x.full(), y.full()]


def test_a_partial_tensor_is_filled_once_and_stays_partial_under_dropout() -> None:
    want = _partial(0, 1)
    for found in pool(3).run(_partial, 3):
        assert all(map(torch.equal, found, want))


def _same_mask_again(rank: int) -> bool:
    x = consistent.ones(64, placement=_placement(2), sbp=S(0), requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    return bool(torch.equal(x.grad.full(), y.detach().full()))


def test_backward_of_dropout_draws_the_mask_of_forward() -> None:
    assert all(pool(2).run(_same_mask_again))


def _successive(rank: int) -> bool:
    x = consistent.ones(64, placement=_placement(2), sbp=S(0))
    return bool(torch.equal(F.dropout(x, 0.5).full(), F.dropout(x, 0.5).full()))


def test_each_call_draws_another_mask() -> None:
    assert not any(pool(2).run(_successive))


def _torch_draws_on(rank: int) -> bool:
    """Whether torch's own numbers go on as if the global ones had not been drawn."""
    found = []
    for drawn in (False, True):
        torch.manual_seed(5)
        numbers = [torch.randn(3)]  # an odd count: a second one is kept back
        if drawn:
            torch.poisson(consistent.ones(5, placement=_placement(2), sbp=B))
            F.dropout(consistent.ones(5, placement=_placement(2), sbp=B), 0.5)
        found.append(torch.cat([*numbers, torch.randn(3), torch.rand(700)]))
    return bool(torch.equal(*found))


def test_torchs_own_generator_is_left_as_it_was() -> None:
    assert all(pool(2).run(_torch_draws_on))


ONE = Placement("cpu", [0])
N = 20_000


def _ones(*shape: int) -> Any:
    return consistent.ones(*shape, placement=ONE, sbp=B)


@pytest.mark.parametrize(
    "draw, mean, deviation",
    [
        (lambda: _ones(N).uniform_(-1, 3), 1.0, 4 / math.sqrt(12)),
        (lambda: _ones(N).normal_(2.0, 0.5), 2.0, 0.5),
        (lambda: _ones(N).exponential_(2.0), 0.5, 0.5),
        (lambda: _ones(N).log_normal_(0.0, 0.25), math.exp(1 / 32), 0.256),
        (lambda: _ones(N).geometric_(0.25), 4.0, math.sqrt(0.75) / 0.25),
        (lambda: _ones(N).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
        (lambda: _ones(N).random_(0, 10), 4.5, math.sqrt(99 / 12)),
        (lambda: torch.bernoulli(_ones(N) * 0.3), 0.3, math.sqrt(0.21)),
        (lambda: torch.randn_like(_ones(N)), 0.0, 1.0),
        (lambda: torch.normal(_ones(N) * 2, _ones(N) * 3), 2.0, 3.0),
        (lambda: F.dropout(_ones(N), 0.2), 1.0, math.sqrt(0.25)),
        (lambda: F.dropout2d(_ones(N // 4, 1, 2, 2), 0.2), 1.0, math.sqrt(0.25)),
        (lambda: F.alpha_dropout(_ones(N).normal_(), 0.3, True), 0.0, 1.0),
        (lambda: F.rrelu(-_ones(N), 0.1, 0.3, True), -0.2, 0.2 / math.sqrt(12)),
        (lambda: torch.poisson(_ones(N) * 4), 4.0, 2.0),
    ],
)
def test_distribution_is_torchs(draw: Callable[[], Any], mean: float, deviation: float) -> None:
    torch.manual_seed(0)
    x = draw().full().double()
    assert abs(x.mean() - mean) < 6 * deviation / math.sqrt(x.numel())
    assert abs(x.std() - deviation) < 0.05 * deviation


def test_dropout_drops_whole_channels() -> None:
    y = F.dropout2d(_ones(50, 4, 3, 3), 0.5).full()
    assert all(len(set(plane.flatten().tolist())) == 1 for plane in y.flatten(0, 1))


def test_one_key_an_op_even_when_nothing_is_dropped() -> None:
    torch.manual_seed(0)
    F.dropout(_ones(3), 0.0)
    assert generator.get_state().counter == 1
    F.dropout(_ones(3), 0.5, training=False)
    assert generator.get_state().counter == 1


def test_filling_a_tensor_with_a_history_cuts_its_gradient() -> None:
    x = _ones(3).requires_grad_()
    y = x * 2
    y.normal_()
    (y.sum() + 3 * x.sum()).backward()
    assert x.grad is not None and x.grad.full().tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match="leaf"):
        x.normal_()


DRAWS: dict[str, Callable[[Any, dict], Any]] = {
    "bernoulli": lambda x, g: torch.bernoulli(x, **g),
    "dropout": lambda x, g: F.dropout(x, 0.3),
    "dropout2d": lambda x, g: F.dropout2d(x[:, :, None, None], 0.3),
    "multinomial": lambda x, g: torch.multinomial(x + 0.1, 3, **g),
    "normal": lambda x, g: torch.normal(x, 2.0, **g),
    "poisson": lambda x, g: torch.poisson(5 * x, **g),
    "rand_like": lambda x, g: torch.rand_like(x),
    "randn": lambda x, g: consistent.randn(3, placement=x.placement, sbp=B, **g),
    "randperm": lambda x, g: consistent.randperm(5, placement=x.placement, sbp=B, **g),
    "rrelu": lambda x, g: F.rrelu(x - 0.5, training=True),
    "uniform_": lambda x, g: x.clone().uniform_(**g),
}
TAKE_A_GENERATOR = "bernoulli multinomial normal poisson randn randperm uniform_".split()


@on_ranks(2, 3)
@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize("name", DRAWS)
def test_unequal_seeds_are_an_error_on_every_rank(rank: int, name: str, sbp: str) -> None:
    clear_plans()
    x = consistent.distribute(torch.full((6, 4), 0.5), consistent.placement.all("cpu"), sbp)
    torch.manual_seed(5 + rank)
    with pytest.raises(RuntimeError, match=r"(?s)draw other.*rank 1: seed 6.*not seed \+ rank"):
        DRAWS[name](x, {})
    with consistent.plain_may_differ():
        DRAWS[name](x, {})
    torch.manual_seed(5)
    torch.rand(rank)  # plain numbers of a rank's own
    DRAWS[name](x, {})


@on_ranks(2)
@pytest.mark.parametrize("name", TAKE_A_GENERATOR)
def test_unequal_generators_are_an_error_on_every_rank(rank: int, name: str) -> None:
    clear_plans()
    x = consistent.distribute(torch.full((6, 4), 0.5), consistent.placement.all("cpu"), B)
    with pytest.raises(RuntimeError, match="(?s)rank 0: generator= of seed 0.*rank 1: generator="):
        DRAWS[name](x, {"generator": torch.Generator().manual_seed(rank)})
    DRAWS[name](x, {"generator": torch.Generator().manual_seed(1)})


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_dropout_in_a_model_whose_ranks_seed_apart_raises(rank: int, when: str) -> None:
    """Whether the program seeds before or after parallelize; not in evaluation, nor at rate 0."""
    clear_plans()
    torch.manual_seed(rank if when == "before" else 0)
    layers = [nn.Embedding(7, 4), nn.Dropout(0.5), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 7)]
    plan = {"2.*": S(0), "4.weight": S(1)}
    model = consistent.parallelize(nn.Sequential(*layers), consistent.placement.all("cpu"), plan)
    torch.manual_seed(rank)
    ids = torch.arange(6)
    model.eval()(ids)
    model.train()[1].p = 0.0
    model(ids)
    model[1].p = 0.5
    with pytest.raises(RuntimeError, match="dropout: the ranks are about to draw other random"):
        model(ids)


@on_ranks(3)
def test_a_rank_outside_the_placement_may_seed_apart(rank: int) -> None:
    clear_plans()
    torch.manual_seed(int(rank == 1))
    x = consistent.rand(5, placement=Placement("cpu", [0, 2]), sbp=B)
    torch.manual_seed(0)
    assert torch.equal(x.full(), consistent.rand(5, placement=_placement(3), sbp=S(0)).full())


@on_ranks(2)
def test_later_draws_send_nothing(rank: int) -> None:
    clear_plans()
    x = consistent.ones(6, placement=_placement(2), sbp=S(0))
    for _ in range(4):
        F.dropout(x, 0.5)
    with counting() as counted:
        F.dropout(x, 0.5)
    assert not counted.calls


# Ops that no call on a tensor of the user's reaches: parts of fused kernels, and factories.
_INNER = """
_cudnn_init_dropout_state _fill_mem_eff_dropout_mask_ _fused_sdp_choice
_nested_tensor_softmax_with_shape _triton_scaled_dot_attention _cudnn_rnn _lstm_mps miopen_rnn
_fused_dropout rand randint randn randperm normal_functional
""".split()


def test_every_random_op_of_torch_has_a_row() -> None:
    lacking = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if (
            not schema.name.startswith("aten::")
            or name in _INNER
            or "_attention" in name
            and name[0] == "_"
        ):
            continue
        op = getattr(torch.ops.aten, name, None)
        overloads = [] if op is None else [getattr(op, o) for o in op.overloads()]
        if any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads):
            if find_row(name.rstrip("_")) is None:
                lacking.add(name)
    assert not lacking


@on_ranks(2)
def test_numbers_drawn_by_way_of_a_tensor_give_it_a_gradient_of_zero(rank: int) -> None:
    for sbp in (B, S(0)):
        where = consistent.placement.all("cpu")
        mean = consistent.distribute(torch.rand(7), where, sbp).requires_grad_()
        (torch.normal(mean, 2.0) + torch.bernoulli(mean)).sum().backward()
        assert torch.equal(mean.grad.full(), torch.zeros(7))
