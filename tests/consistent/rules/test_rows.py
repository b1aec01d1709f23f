"""Every row proven by brute force on the examples of its family (`examples/<family>.py`)."""

from __future__ import annotations

import pytest

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.rules import ROWS, find_row
from tests.brute_force import Earlier
from tests.consistent.rules.corpus import EXAMPLES, FAMILIES
from tests.consistent.rules.examples.linalg import GONE
from tests.each_of import each
from tests.torch_release import IS_2_13


@pytest.mark.parametrize("family", FAMILIES)
def test_every_claimed_signature_is_right(family: str) -> None:
    earlier = Earlier()
    each(FAMILIES[family], lambda case: case.check(3, earlier))


@pytest.mark.parametrize("family", FAMILIES)
def test_axes_choose_independently(family: str) -> None:
    earlier = Earlier()
    each(FAMILIES[family], lambda case: case.check((2, 2), earlier))


PROVEN = {resolve(case.func).name for case in EXAMPLES}
# Torch has no kernel of them that runs on the CPU with gradients: their forms' tests compare them
# with attention by one matrix of scores.
PROVEN |= {"flex_attention", "_varlen_attn"}


# What torch does not have, or not for the CPU and for meta.
LACKING = {"_convolution", "_scaled_mm_v2", "_upsample_lanczos2d_aa"} if not IS_2_13 else set()


def test_every_name_has_an_example() -> None:
    lacking = sorted(set(ROWS) - GONE - LACKING - PROVEN)
    assert not lacking, f"no example for {[(name, str(find_row(name))) for name in lacking]}"
