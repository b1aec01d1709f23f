"""Models of transformers with ``attn_implementation="flex_attention"``, which plain torch does not
train on a CPU: a step under each plan is that of one process with ``"sdpa"`` or ``"eager"``."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

pytest.importorskip("transformers", reason="the models are those of the transformers library")

from transformers import masking_utils

import consistent
from consistent import Placement, S
from tests.models.sequences import NAMES, SEQUENCES
from tests.models.steps import allowed, step, worst
from tests.ranks import ALL, pool

FEW = [
    ("Llama", "padded", "data"), ("Llama", "packed", "context"), ("Mistral", "windowed", "tensor"),
    ("Qwen3", "plain", "zero3"), ("Gemma2", "windowed", "context"), ("Mixtral", "padded", "zero3"),
]  # fmt: skip
# Of these flex_attention raises in plain transformers on a CPU: sinks are refused, and the bias of
# positions is read beyond its one row.
REFUSED = frozenset(("GptOss", "T5"))
PLANS = ("data", "zero3", "tensor", "context")
EVERY = [(name, kind, plan) for kind, names in NAMES.items() for name in names for plan in PLANS]


def made(kind: str, name: str, device: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(model, inputs) there."""
    model, inputs = SEQUENCES[kind](name)
    there = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    return model.eval().to(device), there


def compared(name: str, kind: str, plan: Any, device: str = "cpu") -> tuple[str, float] | None:
    """Where a step differs most from that of one process, and how much; None if the model has no
    such attention. A collective."""
    model, inputs = made(kind, name, device)
    if name in REFUSED or not getattr(model, "_supports_flex_attn", False):
        return None
    model.set_attn_implementation("flex_attention")  # type: ignore[operator]
    placement = Placement.all(device)
    model = consistent.parallelize(model, placement, plan)
    if plan in ("data", "zero3"):
        inputs = {
            k: consistent.distribute(x, placement, S(0)) if isinstance(x, torch.Tensor) else x
            for k, x in inputs.items()
        }
    found = step(model, inputs)
    whole = {key: x.full() if hasattr(x, "full") else x for key, x in found.items()}
    return worst(whole, step(*made(kind, name, device)))


def _block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
    """The mask that transformers asks for, without the code by which Inductor finds its blocks: it
    takes seconds to compile."""
    return create_block_mask(*args, **kwargs)


def one(rank: int, name: str, kind: str, plan: str) -> float | None:
    """The error of a step; None if the model has no such attention."""
    warnings.filterwarnings("ignore")
    compiled = ALL or (name, kind, plan) == FEW[0]  # whose mask is a global tensor
    not_compiled = patch.object(masking_utils, "create_block_mask", _block_mask)
    with nullcontext() if compiled else not_compiled:
        found = compared(name, kind, plan)
    return None if found is None else found[1]


@pytest.mark.parametrize(("name", "kind", "plan"), EVERY if ALL else FEW)
def test_a_step_is_that_of_one_process(name: str, kind: str, plan: Any) -> None:
    error = pool(2).run(one, name, kind, plan, timeout=300)[0]
    if error is None:
        pytest.skip(f"{name} has no flex_attention")
    assert error < allowed(name)
