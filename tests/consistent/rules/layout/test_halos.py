"""Where the elements along a dim come from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from consistent.rules.layout.halos import pad_source_index, wrapped_ranges


def test_places_are_counted_round_the_dim() -> None:
    assert wrapped_ranges(-2, 3, 5) == [(3, 5), (0, 3)]
    assert wrapped_ranges(4, 12, 5) == [(4, 5), (0, 5), (0, 2)]
    assert wrapped_ranges(3, 3, 5) == []


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_border_is_that_of_torch(mode: str) -> None:
    want = F.pad(torch.arange(5.0).view(1, 5), (4, 3), mode)[0]
    assert [pad_source_index(mode, place, 5) for place in range(-4, 8)] == want.tolist()
