"""Python objects in which modules of stages keep tensors: every rank is told, in training and
without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from consistent import Placement
from consistent.nn import pipeline
from tests.ranks import on_ranks


class Store:
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.last: Any = None


class Layer(nn.Linear):
    def forward(self, x: Any, store: Any) -> Any:  # type: ignore[override]
        y = super().forward(x)
        if isinstance(store, list):
            store.append(y)
            return y + store[0]
        if isinstance(store, dict):
            store[len(store)] = y
            return y + store[0]
        store.kept.append(y)
        return y + store.kept[0]


class Attribute(nn.Linear):
    def forward(self, x: Any, store: Any) -> Any:  # type: ignore[override]
        store.last = super().forward(x)
        return store.last


class Given(nn.Linear):
    def forward(self, x: Any, store: Any) -> Any:  # type: ignore[override]
        return super().forward(x) + store.last


class Net(nn.Module):
    """Its layers share an object that its forward makes."""

    def __init__(self, layer: Any, make: Any, fill: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(4, 4) for _ in range(4))
        self.make, self.fill = make, fill

    def forward(self, x: Any) -> Any:
        store = self.make()
        if self.fill:
            store.last = x * 2
        for layer in self.layers:
            x = layer(x, store)
        return x


KEPT: dict[str, tuple[Any, Any, bool]] = {
    "a list of an object": (Layer, Store, False),
    "a list": (Layer, list, False),
    "a dict": (Layer, dict, False),
    "an attribute": (Attribute, Store, False),
    "what was there before": (Given, Store, True),
}
WORDS = "keeps? tensors[^|]*recorded once"


@pytest.mark.parametrize("name", KEPT)
@on_ranks(2)
def test_a_module_that_keeps_tensors_is_an_error(rank: int, name: str) -> None:
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(Net(*KEPT[name]), world, micro_batches=2, loss=F.mse_loss)
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match=WORDS):
        pipe.step(x, x)
    with pytest.raises(RuntimeError, match=WORDS), torch.no_grad():
        pipe(x)


@on_ranks(2)
def test_the_cache_of_a_transformers_model_is_an_error(rank: int) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(31, (4, 6))
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(transformers.LlamaForCausalLM(config), world, micro_batches=2)
    with pytest.raises(RuntimeError, match=r"use_cache = False"):
        pipe.step({"input_ids": ids, "labels": ids})
    pipe.model.config.use_cache = False
    pipe.step({"input_ids": ids, "labels": ids})
