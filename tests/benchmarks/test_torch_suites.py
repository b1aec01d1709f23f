"""A small part of benchmarks/torch_suites.py, and what it prints."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.torch_suites import outcomes, summary
from tests.ranks import pool

SAMPLES = [
    ("modules", "nn.MultiLabelMarginLoss", [6, 7]),
    ("modules", "nn.LazyConv1d", [0]),
    ("modules", "nn.LSTM", [0, 40]),
    ("modules", "nn.TransformerDecoderLayer", [0, 1]),
    ("modules", "nn.FractionalMaxPool2d", [0]),
    ("optimizers", "SparseAdam", [2]),
    ("optimizers", "Muon", [0]),
    ("optimizers", "Adafactor", [1]),
    ("optimizers", "LBFGS", [4]),
]


@pytest.mark.parametrize("suite, name, indices", SAMPLES, ids=lambda x: str(x))
def test_samples_are_right_in_every_layout(suite: str, name: str, indices: list[int]) -> None:
    found = outcomes(pool(2), suite, name, indices)
    assert len(found) == 4 * len(indices)
    assert all(outcome == "right" for outcome, _ in found), found


def test_the_line_of_a_suite_counts_what_torch_itself_takes() -> None:
    counts = Counter({"right": 1200, "wrong": 1, "torch raises": 4})
    assert summary("modules", 3, counts) == (
        "modules, 3 ranks: 1,200 of 1,201 right, 0 raises, 1 wrong, 0 hangs; "
        "4 that plain torch refuses"
    )
