"""Unmodified transformers models under three layouts: loss and gradients equal one process."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

from tests.models.zoo import LAYOUTS, MODELS, compare
from tests.ranks import ON_ONE_AXIS, pool

CASES = [(name, layout) for name in MODELS for layout in LAYOUTS]
# Ops of these models that may run whole on every rank. An op that is not here has lost its rule.
WHOLE: frozenset[str] = frozenset()
# They compute losses, norms or softmax in float32, whatever their weights are.
SINGLE_INSIDE = ("llama", "gpt2", "t5")


def _compare(rank: int, name: str, layout: str) -> dict[str, Any]:
    return compare(name, layout, rank)


# Three ranks hold uneven shards, and two nothing that three do not.
@pytest.mark.parametrize("world", ON_ONE_AXIS)
@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{n}-{l}" for n, l in CASES])
def test_one_training_step_equals_one_process(name: str, layout: str, world: int) -> None:
    results = pool(world).run(_compare, name, layout, timeout=120)
    if os.environ.get("CONSISTENT_SHOW"):
        print(
            f"\n{name} {layout} {world} ranks: {results[0]['worst']}, {results[0]['bytes']} bytes, "
            f"whole: {results[0]['whole']}"
        )
    for result in results:
        assert result["worst"][1] < (1e-5 if name in SINGLE_INSIDE else 1e-12), result["worst"]
        assert set(result["whole"]) <= WHOLE, sorted(set(result["whole"]) - WHOLE)
