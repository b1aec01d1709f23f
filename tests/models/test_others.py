"""Other architectures of transformers, unmodified, under each plan: loss, gradients and the loss
after a step are those of one process. All of them with CONSISTENT_TEST_ALL=1."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

from consistent import Placement
from tests.models.others import OTHERS
from tests.models.steps import allowed, alone, under, worst
from tests.ranks import ALL, ON_ONE_AXIS, pool

# Delta rules, compressed keys, layers of several kinds, positions apart from contents, attention
# of windows, images cut and joined.
FEW = (
    *("causal qwen3_next", "causal deepseek_v2", "causal gemma3n_text"),
    *("masked deberta-v2", "masked longformer", "image mobilevit"),
)
# Those that are dearest by themselves are under one of the plans.
ONCE = {"causal gemma3n_text": "tensor+sequence", "image mobilevit": "zero3"}
PLANS = {"data": True, "zero3": True, "tensor": False, "tensor+sequence": False}
# Less than that is what is left of terms that cancel: a gate's bias, a scale of an activation.
LEAST = 1e-4


EVERY = [(name, plan) for name in OTHERS for plan in PLANS]
CASES = [
    (name, plan)
    for name in FEW
    for plan in ("zero3", "tensor+sequence")
    if ONCE.get(name, plan) == plan
]


def _compared(rank: int, name: str, plan: str) -> tuple[str, float]:
    # Nothing is kept, as of large models.
    _, found = under(name, plan, Placement.all("cpu"), PLANS[plan], keep_bytes=0)
    return worst(found, alone(name), LEAST)


@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
@pytest.mark.parametrize(("name", "plan"), EVERY if ALL else CASES)
def test_a_step_is_that_of_one_process(name: str, plan: str, ranks: int) -> None:
    for where, error in pool(ranks).run(_compared, name, plan, timeout=150):
        assert error < allowed(name), where
