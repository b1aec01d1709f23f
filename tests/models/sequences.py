"""Models with other sequences than those of ``architectures.py``: padded, packed, long ones behind
windows, whose lengths divide by no number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.models import architectures
from tests.models.architectures import DECODERS, MIXTURES, MODELS, PAIRS, Made, tokens

TOKENS = 11
DOCUMENTS = (5, 1, 7, 10)
WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 4},
    "Phi3": {"sliding_window": 4},
    "Starcoder2": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "GptOss": {"sliding_window": 4},
    "ModernBert": {"local_attention": 4},
}


def plain(name: str) -> Made:
    """Rows of one length, without a mask."""
    return MODELS[name]()


def padded(name: str) -> Made:
    """Rows of many lengths, filled up at their ends."""
    model, inputs = MODELS[name]()
    ids = tokens(5, TOKENS)
    mask = torch.ones_like(ids)
    for row, count in enumerate((3, 0, 7, 1)):
        mask[row, TOKENS - count :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if "input_features" in inputs:
        return model, {**inputs, "labels": labels}
    return model, {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def packed(name: str) -> Made:
    """Documents one after the other in one row, as DataCollatorWithFlattening gives them."""
    from transformers import DataCollatorWithFlattening

    model, _ = MODELS[name]()
    rows = tokens(6, max(DOCUMENTS))
    items = [{"input_ids": rows[i, :n].tolist()} for i, n in enumerate(DOCUMENTS)]
    collate: Any = DataCollatorWithFlattening(return_tensors="pt")
    return model, dict(collate(items))


def windowed(name: str) -> Made:
    """Rows that are longer than the window of the model."""
    with _sizes(name):
        model, _ = MODELS[name]()
    ids = tokens(7, TOKENS)
    return model, {"input_ids": ids, "labels": ids}


@contextmanager
def _sizes(name: str) -> Iterator[None]:
    """The model's configuration with a window."""
    made = architectures.made_of

    def with_window(config: str, model: str, given: dict[str, Any], inputs: Any) -> Made:
        return made(config, model, {**given, **WINDOWS[name]}, inputs)

    architectures.made_of = with_window
    try:
        yield
    finally:
        architectures.made_of = made


SEQUENCES: dict[str, Callable[[str], Made]] = {
    "plain": plain, "padded": padded, "packed": packed, "windowed": windowed,
}  # fmt: skip
NAMES: dict[str, tuple[str, ...]] = {
    "plain": tuple({**DECODERS, **MIXTURES, **PAIRS}),
    "padded": tuple({**DECODERS, **MIXTURES, **PAIRS}),
    "packed": tuple({**DECODERS, **MIXTURES}),
    "windowed": tuple(WINDOWS),
}
