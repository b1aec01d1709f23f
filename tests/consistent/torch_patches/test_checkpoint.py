"""Checkpoints keep their inputs global, also where hooks for saved tensors are around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from consistent import S
from tests.ranks import ON_ONE_AXIS, pool
from tests.twins import GRIDS, Laid, compare, randn


def _inside_save_on_cpu(at: Laid, reentrant: bool) -> Any:
    a, b = at.leaf(randn(4, 6), S(1)), at.leaf(randn(6, 5, seed=1), S(0))

    def run_again(x: Any) -> Any:
        return torch.tanh(F.layer_norm(x, (5,)))

    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(run_again, a @ b, use_reentrant=reentrant)  # of a sum over ranks
        loss = y.square().sum()
    loss.backward()
    return loss, a.grad, b.grad


@pytest.mark.parametrize("world", ON_ONE_AXIS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_stay_global_inside_hooks(reentrant: bool, world: int) -> None:
    pool(world).run(compare, _inside_save_on_cpu, GRIDS[world], reentrant)
