"""Models of transformers with ``attn_implementation="flex_attention"``, which plain torch does not
train on a CPU: a step under each plan is that of one process with ``"sdpa"`` or ``"eager"``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

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


def one(rank: int, name: str, kind: str, plan: str) -> float | None:
    """The error of a step; None if the model has no such attention."""
    warnings.filterwarnings("ignore")
    model, inputs = SEQUENCES[kind](name)
    if name in REFUSED or not getattr(model, "_supports_flex_attn", False):
        return None
    model.set_attn_implementation("flex_attention")
    placement = Placement.all("cpu")
    model = consistent.parallelize(model.eval(), placement, plan)
    if plan in ("data", "zero3"):
        rows = {k: consistent.distribute(x, placement, S(0)) for k, x in inputs.items()}
    else:
        rows = inputs
    found = step(model, rows)
    whole = {key: x.full() if hasattr(x, "full") else x for key, x in found.items()}
    if rank:
        return 0.0
    model, inputs = SEQUENCES[kind](name)
    return worst(whole, step(model.eval(), inputs))[1]


@pytest.mark.parametrize(("name", "kind", "plan"), EVERY if ALL else FEW)
def test_a_step_is_that_of_one_process(name: str, kind: str, plan: Any) -> None:
    error = pool(2).run(one, name, kind, plan)[0]
    if error is None:
        pytest.skip(f"{name} has no flex_attention")
    assert error < allowed(name)
