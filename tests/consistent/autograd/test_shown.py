"""The layout in which a gradient is shown whose addends still wait: what is there becomes it
without a message, which one rank alone could not send."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import pytest
import torch

from consistent import B, P, Placement, S, TensorSpec
from consistent.autograd.shown import _common_partial_spec
from consistent.boxing.plan import boxing_bytes

ENTRIES = (B, P, S(0), S(1))


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 3)])
def test_nothing_is_sent_to_show_a_gradient(shape: tuple[int, ...]) -> None:
    ranks = torch.arange(torch.tensor(shape).prod().item()).view(shape).tolist()
    placement = Placement("cpu", ranks)
    specs = [
        TensorSpec.of(placement, sbp, (5, 4), torch.float64)
        for sbp in product(ENTRIES, repeat=len(shape))
    ]
    for pair in combinations_with_replacement(specs, 2):
        found = _common_partial_spec(pair)
        assert not any(boxing_bytes(spec, found) for spec in pair), (pair, found)
        assert found is pair[0] or pair[0] is not pair[1]
