"""A collate function that pads to the longest of its part: padded as its tokenizer pads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader

from consistent import Placement
from consistent.data import loader
from tests.ranks import on_ranks


def tokenizer(side: str) -> Any:
    words = {f"w{n}": n for n in range(20)} | {"[PAD]": 20, "[MASK]": 21}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="[PAD]", mask_token="[MASK]", padding_side=side,
    )  # fmt: skip
    return made


def items(*keys: str) -> list[dict[str, Any]]:
    """Item i has i % 4 + 1 tokens, so parts differ in their longest."""
    values: dict[str, Any] = {
        "input_ids": lambda n: list(range(1, n + 1)),
        "attention_mask": lambda n: [1] * n,
        "token_type_ids": lambda n: [0] * n,
        "labels": lambda n: list(range(3, n + 3)),
    }
    return [{key: values[key](length) for key in keys} for length in (1, 3, 2, 2, 1, 5, 4)]


def padded(tok: Any, rows: list) -> Any:
    return tok.pad(rows, return_tensors="pt")


class Collator:
    def __init__(self, tok: Any) -> None:
        self.inner = transformers.DataCollatorWithPadding(tok)

    def __call__(self, rows: list) -> Any:
        return self.inner(rows)


def collators(tok: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    plain = ("input_ids", "attention_mask", "token_type_ids")
    causal = transformers.DataCollatorForLanguageModeling(tok, mlm=False)
    return {
        "with padding": (transformers.DataCollatorWithPadding(tok), plain),
        "to a multiple": (transformers.DataCollatorWithPadding(tok, pad_to_multiple_of=2), plain),
        "causal": (causal, plain[:2]),
        "sequences": (
            transformers.DataCollatorForSeq2Seq(tok, label_pad_token_id=-7),
            (*plain[:2], "labels"),
        ),
        "tokens": (transformers.DataCollatorForTokenClassification(tok), (*plain[:2], "labels")),
        "partial": (functools.partial(padded, tok), plain),
        "lambda": (lambda rows: tok.pad(rows, return_tensors="pt"), plain),
        "in an object": (Collator(tok), plain),
    }


@on_ranks(2, 3)
def test_parts_are_padded_as_their_tokenizer_pads(rank: int) -> None:
    place = Placement("cpu", range(torch.distributed.get_world_size()))
    for side in ("right", "left"):
        for name, (collate, keys) in collators(tokenizer(side)).items():
            one = DataLoader(items(*keys), batch_size=4, collate_fn=collate)  # type: ignore
            for found, wanted in zip(loader(one, place), one, strict=True):
                for key in wanted:
                    assert torch.equal(found[key].full(), wanted[key]), (side, name, key)


@on_ranks(2)
def test_what_no_tokenizer_pads_names_the_argument(rank: int) -> None:
    rows = items("input_ids")
    collate = lambda part: {  # noqa: E731
        "own": torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row["input_ids"]) for row in part], batch_first=True
        )
    }
    one = DataLoader(rows, batch_size=7, collate_fn=collate)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)pad=.*Accelerator, GlobalStrategy or Trainer"):
        next(iter(loader(one, Placement("cpu", [0, 1]))))
