"""Every public argument that takes an SBP takes it in every form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, S, flow
from consistent.nn import Border, Layouts
from mirrored import MirroredTensor, scatter

HERE = consistent.placement("cpu", [0])
FORMS = [S(0), "S(0)", "split(dim=0)", "(S(0),)", (S(0),), ["S(0)"], 0, [0]]

VALUE = torch.arange(4.0)


def made(function: Callable[..., Any], *args: Any) -> Callable[[Any], Any]:
    return lambda sbp: function(*args, placement=HERE, sbp=sbp).sbp


def linear(**options: Any) -> Any:
    return consistent.parallelize(torch.nn.Linear(4, 4), HERE, **options)


def moved(**options: Any) -> Any:
    model = linear()
    consistent.move(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    return model


def gradient(sbp: Any) -> Any:
    x = consistent.distribute(VALUE, HERE, S(0)).requires_grad_()
    x.to_global(grad_sbp=sbp).sum().backward()
    return x.grad.sbp


def batch(sbp: Any) -> Any:
    return next(iter(consistent.data.loader([VALUE], HERE, sbp, batch_size=1))).sbp


# Argument -> a call with it, which gives the SBP that it was taken for.
CALLS: dict[str, Callable[[Any], Any]] = {
    "arange.sbp": made(consistent.arange, 4),
    "empty.sbp": made(consistent.empty, 4),
    "eye.sbp": made(consistent.eye, 4),
    "full.sbp": made(consistent.full, (4,), 1.0),
    "linspace.sbp": made(consistent.linspace, 0, 1, 4),
    "logspace.sbp": made(consistent.logspace, 0, 1, 4),
    "normal.sbp": made(consistent.normal, 0.0, 1.0, (4,)),
    "ones.sbp": made(consistent.ones, 4),
    "rand.sbp": made(consistent.rand, 4),
    "randint.sbp": made(consistent.randint, 0, 4, (4,)),
    "randn.sbp": made(consistent.randn, 4),
    "randperm.sbp": made(consistent.randperm, 4),
    "tensor.sbp": made(consistent.tensor, [1.0, 2.0]),
    "zeros.sbp": made(consistent.zeros, 4),
    "distribute.sbp": lambda sbp: consistent.distribute(VALUE, HERE, sbp).sbp,
    "from_local.sbp": lambda sbp: consistent.from_local(VALUE, HERE, sbp).sbp,
    "parallelize.inputs": lambda sbp: linear(inputs=sbp)(VALUE[None]).sbp,
    "parallelize.plan": lambda sbp: linear(plan={"weight": sbp}).weight.sbp,
    "move.inputs": lambda sbp: moved(inputs=sbp)(VALUE[None]).sbp,
    "move.plan": lambda sbp: moved(plan={"weight": sbp}).weight.sbp,
    "Layouts.sbp": lambda sbp: Layouts(sbp).use,
    "Border.inputs": lambda sbp: Border(inputs={0: sbp}).inputs[0],
    "GlobalTensor.to_global.sbp": lambda sbp: (
        consistent.distribute(VALUE, HERE, B).to_global(sbp=sbp).sbp
    ),
    "GlobalTensor.to_global.grad_sbp": gradient,
    "MirroredTensor.to_global.sbp": lambda sbp: scatter([VALUE], [0]).to_global(sbp).sbp,
    "loader.sbp": batch,
    "flow.arange.sbp": made(flow.arange, 4),
    "flow.empty.sbp": made(flow.empty, 4),
    "flow.full.sbp": made(flow.full, (4,), 1.0),
    "flow.ones.sbp": made(flow.ones, 4),
    "flow.rand.sbp": made(flow.rand, 4),
    "flow.randint.sbp": made(flow.randint, 0, 4, (4,)),
    "flow.randn.sbp": made(flow.randn, 4),
    "flow.to_global.sbp": made(flow.to_global, VALUE),
    "flow.zeros.sbp": made(flow.zeros, 4),
}
# What has an argument of that name that is none, or hands it to one of the above.
OTHERS = {"GlobalTensor.backward.inputs", "MirroredTensor.backward.inputs", "Loader.sbp"}
OTHERS |= {"from_pretrained.plan", "pipeline.plan"}


def arguments() -> Iterator[str]:
    """``function.argument`` of all public functions that take an SBP or a plan."""
    spaces: list[tuple[str, Any]] = [("", consistent), ("", consistent.nn), ("", consistent.data)]
    spaces += [("flow.", flow), ("GlobalTensor.", consistent.GlobalTensor)]
    for prefix, space in [*spaces, ("MirroredTensor.", MirroredTensor)]:
        for name, value in inspect.getmembers(space, callable):
            try:
                parameters = inspect.signature(value).parameters
            except (TypeError, ValueError):  # a class or builtin without one
                continue
            if not name.startswith("_"):
                for each in parameters:
                    if "sbp" in each or each in ("inputs", "plan"):
                        yield f"{prefix}{name}.{each}"


def test_no_argument_is_forgotten() -> None:
    assert set(arguments()) == set(CALLS) | OTHERS


@pytest.mark.parametrize("argument", CALLS)
def test_an_sbp_is_taken_in_every_form(argument: str) -> None:
    for form in FORMS:
        assert CALLS[argument](form) == (S(0),), form


@pytest.mark.parametrize("argument", CALLS)
@pytest.mark.parametrize("wrong", ["Shard(0)", True], ids=str)
def test_what_is_no_sbp_is_an_error_that_says_what_to_write(argument: str, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"S\(0\)"):
        CALLS[argument](wrong)


def test_several_axes_take_numbers_and_text() -> None:
    grid = consistent.placement("cpu", [[0]])
    assert consistent.zeros(4, 4, placement=grid, sbp=(1, "P")).sbp == (S(1), P)
