"""The fused sum is differentiable, as often as one likes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent.forms.native.reduce_shards import Epilogue, EpilogueInputs, Slice, reduce_shards
from tests.twins import randn

EPILOGUES = [
    Epilogue(),
    Epilogue(2.0, "gelu"),
    Epilogue(1.0, "gelu_tanh"),
    Epilogue(0.5, "silu", "layer", 1),
    Epilogue(1.0, "none", "rms", 1, 1e-6),
    Epilogue(1.0, "relu", "layer", 2),
]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=repr)
def test_first_and_second_derivatives_of_all_that_is_given(epilogue: Epilogue) -> None:
    parts, residual = [_leaf(3, 2, 3), _leaf(3, 2, 3)], _leaf(2, 2, 3)
    tail = (3,) if epilogue.normalized == 1 else (2, 3)
    given = EpilogueInputs(
        bias=_leaf(3) if epilogue.normalized < 2 else None,
        residual=residual,
        weight=_leaf(*tail) if epilogue.normalized else None,
        norm_bias=_leaf(*tail) if epilogue.norm == "layer" else None,
    )

    def run(*_: Any) -> torch.Tensor:
        return reduce_shards(parts, epilogue, given, Slice(0, 1, 2))

    beside = (given.bias, given.residual, given.weight, given.norm_bias)
    leaves = [*parts, *(t for t in beside if t is not None)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    x, weight = randn(2, 3), randn(3, seed=1).requires_grad_()
    reduce_shards(
        [x, x], Epilogue(norm="rms", normalized=1), EpilogueInputs(weight=weight)
    ).sum().backward()
    leaf = weight.detach().requires_grad_()
    torch.nn.functional.rms_norm(x + x, (3,), leaf, 1e-5).sum().backward()
    torch.testing.assert_close(weight.grad, leaf.grad)


def test_parts_of_bfloat16_get_gradients_of_bfloat16() -> None:
    parts = [torch.randn(2, 3).bfloat16().requires_grad_() for _ in range(2)]
    reduce_shards(parts, Epilogue(activation="silu"), dtype=torch.float32).sum().backward()
    assert parts[0].grad is not None and parts[0].grad.dtype == torch.bfloat16
    assert parts[1].grad is not None and torch.equal(parts[0].grad, parts[1].grad)


def test_no_parts_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        reduce_shards([])
