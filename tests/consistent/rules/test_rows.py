"""Every row proven by brute force on the examples of its family (`examples/<family>.py`)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.rules import ROWS, find
from tests.brute_force import Example
from tests.consistent.rules.examples.linalg import GONE
from tests.torch_release import IS_2_13

FAMILIES = {
    path.stem: importlib.import_module(f"tests.consistent.rules.examples.{path.stem}").EXAMPLES
    for path in sorted((Path(__file__).parent / "examples").glob("*.py"))
    if path.stem not in ("__init__", "numbers")
}
EXAMPLES = [example for examples in FAMILIES.values() for example in examples]


@pytest.mark.parametrize("case", EXAMPLES, ids=repr)
def test_every_claimed_signature_is_right(case: Example) -> None:
    case.check(ranks=3)


@pytest.mark.parametrize("case", EXAMPLES, ids=repr)
def test_axes_choose_independently(case: Example) -> None:
    case.check(ranks=(2, 2))


PROVEN = {resolve(case.func).name for case in EXAMPLES}
# Torch has no kernel of them that runs on the CPU with gradients: their forms' tests compare them
# with attention by one matrix of scores.
PROVEN |= {"flex_attention", "_varlen_attn"}


# What torch does not have, or not for the CPU and for meta.
LACKING = {"_convolution", "_scaled_mm_v2", "_upsample_lanczos2d_aa"} if not IS_2_13 else set()


@pytest.mark.parametrize("name", sorted(set(ROWS) - GONE - LACKING))
def test_every_name_has_an_example(name: str) -> None:
    assert name in PROVEN, f"no example for {name} of {find(name)}"
