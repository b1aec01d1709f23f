"""Decoders, mixtures and encoder-decoders under the plan "context": a step on padded, packed and
windowed sequences is that of one process, and tokens stay where the plan puts them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

import consistent
from benchmarks.contexts import BESIDE, one
from consistent import Placement
from mirrored.transports.counting import counting
from tests.models.architectures import MODELS
from tests.models.sequences import NAMES
from tests.models.steps import allowed
from tests.ranks import ALL, on_ranks, pool

# The whole of Bloom's activation is a function of its own, which runs on whole tensors.
WHOLE = {"Bloom": ["GeLUFunction"]}
FEW = [
    ("Llama", "padded", 3), ("Qwen3", "packed", 2), ("Mistral", "windowed", 2),
    ("T5", "padded", 2), ("GptOss", "windowed", 3), ("Mixtral", "packed", 4),
    ("Llama", "with tensor", 4), ("T5", "with zero3", 4),
]  # fmt: skip
EVERY = [
    *((name, kind, n) for kind, names in NAMES.items() for name in names for n in (2, 3, 4)),
    *((name, kind, 4) for kind in BESIDE for name in NAMES["plain"]),
]


@pytest.mark.parametrize(("name", "kind", "ranks"), EVERY if ALL else FEW)
def test_a_step_is_that_of_one_process(name: str, kind: str, ranks: int) -> None:
    found = pool(ranks).run(one, name, kind)
    assert found[0][0] < allowed(name)  # the first rank compares
    assert all(whole == WHOLE.get(name, []) for _, _, whole in found)


@pytest.mark.parametrize("name", ["Llama", "T5"])
@on_ranks(2)
def test_no_token_changes_its_rank(rank: int, name: str) -> None:
    model, inputs = MODELS[name]()
    model = consistent.parallelize(model.eval(), Placement.all("cpu"), "context")
    with consistent.plain_may_differ(), counting() as log:
        model(**inputs)
    # Attention's keys go round; the loss is a sum.
    assert set(log.names) <= {"exchange", "all_gather", "all_reduce", "gather_objects"}
