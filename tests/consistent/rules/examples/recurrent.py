"""Calls that prove the rows of consistent/rules/recurrent.py."""

from __future__ import annotations

import torch
from torch import _VF

from tests.brute_force import Example, example
from tests.consistent.rules.examples.numbers import real
from tests.consistent.rules.examples.random import drawn


def _weights(gates: int, layers: int, width: int, hidden: int) -> list[torch.Tensor]:
    """Weights and biases of ``layers`` layers."""
    made: list[torch.Tensor] = []
    for layer in range(layers):
        rows = gates * hidden
        made += [real(rows, hidden if layer else width), real(rows, hidden), real(rows), real(rows)]
    return made


_LSTM = (_weights(4, 2, 3, 4), True, 2)
_NET = (_weights(1, 2, 3, 4), True, 2)
_STATES = [real(2, 5, 4), real(2, 5, 4)]


def _cell(gates: int) -> tuple[torch.Tensor, ...]:
    return (real(gates * 4, 3), real(gates * 4, 4), real(gates * 4), real(gates * 4))


EXAMPLES: tuple[Example, ...] = (
    example(
        _VF.gru,
        real(2, 5, 3),
        real(1, 5, 4),
        _weights(3, 1, 3, 4),
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    example(_VF.gru_cell, real(5, 3), real(5, 4), *_cell(3)),
    example(_VF.lstm, real(2, 5, 3), _STATES, *_LSTM, 0.0, True, False, False),
    example(_VF.lstm, real(5, 2, 3), _STATES, *_LSTM, 0.5, False, False, True),
    drawn(_VF.lstm, real(2, 5, 3), _STATES, *_LSTM, 0.5, True, False, False),
    example(_VF.lstm_cell, real(5, 3), [real(5, 4), real(5, 4)], *_cell(4)),
    example(_VF.rnn_relu, real(2, 5, 3), real(2, 5, 4), *_NET, 0.0, False, False, False),
    drawn(_VF.rnn_tanh, real(2, 5, 3), real(2, 5, 4), *_NET, 0.5, True, False, False),
    example(_VF.rnn_relu_cell, real(5, 3), real(5, 4), *_cell(1)),
    example(_VF.rnn_tanh_cell, real(5, 3), real(5, 4), *_cell(1)),
)
