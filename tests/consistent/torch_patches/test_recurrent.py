"""Recurrent layers whose weights are global leave them where they are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from consistent import B, GlobalTensor, Placement, S
from tests.ranks import SIZES, on_ranks, pool
from tests.twins import GRIDS, Laid, compare, randn

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def _layer(kind: str) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](4, 3, num_layers=2, bidirectional=True)


@on_ranks(2)
def test_weights_are_not_packed_into_one_memory(rank: int) -> None:
    """What a layer on CUDA does, up to the kernel."""
    for kind in KINDS:
        for sbp in (S(0), B):
            layer: Any = Laid(Placement("cpu", [0, 1])).module(_layer(kind), {"*": sbp})
            layer(randn(2, 5, 4).float())  # its list of weights is that of the global ones
            before = [w.to_local().data_ptr() for w in layer._flat_weights]
            accepts = mock.patch("torch.backends.cudnn.is_acceptable", lambda x: True)
            with accepts, mock.patch.object(GlobalTensor, "is_cuda", True):
                layer.flatten_parameters()
            assert before == [w.to_local().data_ptr() for w in layer._flat_weights]


def _trained(at: Laid, kind: str) -> Any:
    layer: Any = at.module(_layer(kind), {"*hh*": S(0), "*ih*": S(0)}).double()
    layer.flatten_parameters()
    y, _ = layer(at(randn(2, 5, 4), S(1)))
    y.square().sum().backward()
    return y, [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_right_after_its_dtype_changed(kind: str, world: int) -> None:
    pool(world).run(compare, _trained, GRIDS[world], kind)
