"""Gradients of leaves are summed in one order on all ranks, whatever their shards hold: parameters
of one shape would be added to each other otherwise, without an error."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import consistent
from benchmarks import suite_cases
from consistent import B, Placement, S
from consistent.autograd import buckets
from consistent.nn import Layouts, Plan
from tests.each_of import each_of
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, pool

SAMPLES = None if ALL else 2  # of each module


class Call(NamedTuple):
    args: tuple
    kwargs: dict[str, Any]


class Sample(NamedTuple):
    """One of torch's samples, without what torch's tests import, seconds in each rank."""

    constructor_input: Call
    forward_input: Call


class Case(NamedTuple):
    """A module with the samples that are run."""

    module_cls: type[nn.Module]
    samples: list[tuple[bool, Sample]]


def _cases() -> dict[str, Case]:
    """Torch's modules that have parameters, which could be taken for each other."""
    found = {}
    for name in suite_cases.names("modules"):
        samples = [(training, _sample(x)) for training, x in suite_cases._module_samples(name)]
        made, cls = samples[0][1].constructor_input, suite_cases._modules()[name].module_cls
        if list(cls(*made.args, **made.kwargs).parameters()):
            step = 1 if SAMPLES is None else -(-len(samples) // SAMPLES)
            found[name] = Case(cls, samples[::step])
    return found


def _sample(x: Any) -> Sample:
    given = (x.constructor_input, x.forward_input)
    return Sample(*(Call(tuple(each.args), dict(each.kwargs)) for each in given))


def _samples(rank: int, ranks: int, cases: dict[str, Case]) -> list[str]:
    """The modules whose gradients are wrong where each is summed as it comes."""
    warnings.simplefilter("ignore")
    placement, wrong = Placement("cpu", range(ranks)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SHARED_ALONE_BYTES", 1)
        patch.setattr(suite_cases, "LAYOUTS", ((B, S(0)),))
        patch.setattr(suite_cases, "_modules", lambda: cases)
        patch.setattr(suite_cases, "_module_samples", lambda name: cases[name].samples)
        for name, case in cases.items():
            for index in range(len(case.samples)):
                for outcome, why in suite_cases._outcomes("modules", name, index, placement):
                    if outcome in ("wrong", "raises"):
                        words = suite_cases.describe("modules", name, index)
                        wrong.append(f"{words}: {outcome} {why}")
    return wrong


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torchs_modules_with_each_gradient_summed_as_it_comes() -> None:
    cases = _cases()
    assert len(cases) > 30
    for wrong in pool(3).run(_samples, 3, cases, timeout=1200):
        assert not wrong, "\n".join(wrong)


LAYERS: dict[str, Any] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6).eval(), (1, 6, 4), 0),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(6, affine=True), (1, 6, 4), 0),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (1, 6, 4), 0),
    "LayerNorm": (lambda: nn.LayerNorm(6), (1, 4, 6), 0),
    "LSTM": (lambda: nn.LSTM(6, 6, 2), (3, 1, 6), 1),
    "GRU": (lambda: nn.GRU(6, 6, 2), (3, 1, 6), 1),
    "RNN": (lambda: nn.RNN(6, 6, 2), (3, 1, 6), 1),
    "MultiheadAttention": (lambda: _SelfAttention(), (3, 1, 6), 1),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(6, 2, 6, 0.0), (3, 1, 6), 1),
    "Conv1d": (lambda: nn.Conv1d(6, 6, 1), (1, 6, 4), 0),
    "two layers": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), (1, 6), 0),
}


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def _one_row(rank: int, name: str, at_once: int, plan: Any = "data") -> list[tuple[str, float]]:
    """The largest error of each parameter's gradient, where one rank has all of the batch."""
    make, shape, dim = LAYERS[name]
    torch.manual_seed(0)
    plain, x = make().double(), torch.randn(shape, dtype=torch.float64)
    ours = make().double()
    ours.load_state_dict(plain.state_dict())
    _loss(plain(x)).backward()
    placement = Placement("cpu", [0, 1])
    consistent.parallelize(ours, placement, plan)
    before, buckets.SHARED_ALONE_BYTES = buckets.SHARED_ALONE_BYTES, at_once
    try:
        _loss(ours(consistent.distribute(x, placement, S(dim)))).backward()
    finally:
        buckets.SHARED_ALONE_BYTES = before
    pairs = zip(plain.named_parameters(), ours.parameters(), strict=True)
    return [(key, float((a.grad - b.grad.full()).abs().max())) for (key, a), b in pairs]  # type: ignore


def _loss(out: Any) -> torch.Tensor:
    y = out[0] if isinstance(out, tuple) else out
    return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).square().sum()


@each_of("at_once", [1, 1 << 30])
@each_of("name", LAYERS)
def test_a_rank_without_rows_adds_to_the_right_parameters(name: str, at_once: int) -> None:
    for errors in pool(2).run(_one_row, name, at_once):
        assert all(error < 1e-11 for _, error in errors), errors


SCATTERED: dict[str, Any] = {
    "zero2": "zero2",
    "zero3": "zero3",
    "zero3, module by module": Plan({"*": Layouts((S(0),), use=(B,))}, keep_bytes=0),
    "gathered by ops": {"*": S(0)},
}


@each_of("plan", SCATTERED)
@each_of("name", LAYERS)
def test_a_rank_without_rows_scatters_to_the_right_parameters(name: str, plan: str) -> None:
    for errors in pool(2).run(over_gloo, _one_row, name, 1, SCATTERED[plan]):
        assert all(error < 1e-11 for _, error in errors), errors
