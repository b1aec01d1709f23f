"""Messages of a training step of unmodified models where ranks share no memory, as between hosts,
and how many of them the program waits for at once: those that are kept in ``messages.csv``.

    python -m tests.models.messages > tests/models/messages.csv     counts all models again

A sum, or a gather, that was meant to travel beside the computation and no longer does is one more
that is waited for.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

from tests.mirrored.kinds import over_gloo
from tests.models.architectures import MODELS
from tests.models.messages import PLANS, counted, kept
from tests.ranks import ALL, pool

FEW = ("Llama", "GPT2", "Mixtral", "T5", "ViT", "Mamba", "Transformer")
KEPT = kept()


@pytest.mark.parametrize("name", sorted(KEPT) if ALL else FEW)
def test_a_step_sends_and_waits_as_often_as_before(name: str) -> None:
    found = pool(2).run(over_gloo, counted, name)
    assert found == [KEPT[name]] * 2


def test_the_table_has_all_models_under_all_plans() -> None:
    assert {name: list(counts) for name, counts in KEPT.items()} == {
        name: list(PLANS) for name in MODELS
    }
