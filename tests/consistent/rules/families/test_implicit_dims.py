"""Ops that choose a dim by themselves, and warn that they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from consistent import B, P, S
from tests.ranks import ON_ONE_AXIS, pool
from tests.twins import GRIDS, Laid, compare, randn


def _chosen(at: Laid, name: str) -> Any:
    found = []
    for shape in ((5,), (5, 4), (2, 5, 4)):
        for entry in (S(0), S(len(shape) - 1), B, P):
            x = at.leaf(randn(*shape), entry)
            y = getattr(F, name)(x)
            (y * y).sum().backward()
            found += [y, x.grad]
    return found


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize("world", ON_ONE_AXIS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
def test_the_dim_is_that_of_torch(name: str, world: int) -> None:
    pool(world).run(compare, _chosen, GRIDS[world], name)
