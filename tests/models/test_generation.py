"""Greedy ``generate`` of transformers under the plans: the tokens of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

import torch

import consistent
from consistent import Placement
from tests.models.architectures import MODELS
from tests.ranks import on_ranks


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("plan", ["data", "zero3", "tensor", "context"])
@on_ranks(2)
def test_tokens_are_those_of_one_process(rank: int, plan: str, cache: str) -> None:
    model, _ = MODELS["Llama"]()
    prompt = torch.arange(2 * 7).view(2, 7) % 11 + 1
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        given["cache_implementation"] = "static"
    want = copy.deepcopy(model).eval().generate(prompt, **given)
    model = consistent.parallelize(model.eval(), Placement.all("cpu"), plan)
    found = model.generate(prompt, **given)
    assert found.tolist() == want.tolist()
