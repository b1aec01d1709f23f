"""Compiled steps of recurrent layers train as eager ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import S
from tests.ranks import ALL, on_ranks

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 6, batch_first=True),
    "LSTM of two layers": lambda: nn.LSTM(4, 6, 2, batch_first=True, bias=False),
    "LSTM both ways": lambda: nn.LSTM(4, 6, batch_first=True, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(4, 6, batch_first=True, proj_size=3),
    "GRU": lambda: nn.GRU(4, 6, batch_first=True),
    "RNN": lambda: nn.RNN(4, 6, batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(4, 6),
    "GRUCell": lambda: nn.GRUCell(4, 6),
    "RNNCell": lambda: nn.RNNCell(4, 6),
}


def _losses(kind: str, backend: str | None) -> list[float]:
    torch.manual_seed(0)
    placement = consistent.placement("cpu", [0, 1])
    model = consistent.parallelize(LAYERS[kind](), placement, "data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y: Any = model(x)
        while isinstance(y, tuple):
            y = y[0]
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run: Any = step if backend is None else consistent.compile(step, backend=backend)
    shape = (4, 4) if "Cell" in kind else (4, 5, 4)
    losses = []
    for number in range(4):
        x = torch.arange(float(torch.Size(shape).numel())).view(shape).sin() + number
        losses.append(run(consistent.distribute(x, placement, S(0))).item())
    if backend is not None:
        assert all(program.why is None for program in run.programs), run.programs[0].why
    return losses


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("backend", ["ops", *(["inductor"] if ALL else [])])
def test_recurrent_layers_train_as_eager_ones_do(rank: int, backend: str) -> None:
    for kind in LAYERS:
        eager = _losses(kind, None)
        assert len(set(eager)) == len(eager)
        assert _losses(kind, backend) == pytest.approx(eager, rel=1e-5), kind
