"""Rules of recurrent layers: the batch may be split, time steps and features may not.

Dropout between layers is drawn by torch, from a seed that is the same on every rank, for the whole
batch.
"""

from __future__ import annotations

from ....spec import S, Sbp
from ...signature import Call, DoesNotFit, Signature
from ...table import Row, add_rows
from ..elementwise.random import draw_whole


def recurrent_layers(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of gru, lstm and rnn, by ``tni, [l]nh -> tno, [l]nh``.

    In the rule t are time steps, n sequences (the batch, which may be split), l layers. The call is
    op(input, hidden, weights, has_biases, num_layers, dropout, train, ...). With dropout in
    training every rank computes the whole batch.
    """
    # Packed sequences never come here: torch has no meta kernel for them, as their lengths are
    # data.
    if len(call.args) < 9:
        raise DoesNotFit("arguments by name")
    x, hidden = call.args[:2]
    dropout, train, *later_args = call.args[5:]
    if dropout and train:
        return draw_whole(call, parts)
    batch = 0 if later_args[-1] else 1
    states = hidden if isinstance(hidden, tuple | list) else (hidden,)
    ins: dict[int, Sbp] = {x.index: S(batch), **{h.index: S(1) for h in states}}
    outs = (S(batch), *(S(1) for _ in call.outs[1:]))
    # Torch refuses an empty batch, and other axes may split the batch too.
    fits = x.shape[batch] >= x.spec.placement.size
    return [call.broadcast_signature(), *([call.new_signature(ins, outs)] if fits else [])]


def recurrent_cell(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of one step of a recurrent cell, by ``ni, nh -> nh``.

    n are the sequences of the batch, along which all tensors are split.
    """
    x, hidden = call.get("input"), call.get("hx")
    if x.ndim != 2:
        return [call.broadcast_signature()]
    states = hidden if isinstance(hidden, tuple | list) else (hidden,)
    return [
        call.broadcast_signature(),
        call.new_signature({x.index: S(0), **{h.index: S(0) for h in states}}, S(0)),
    ]


ROWS = (
    Row("gru lstm rnn_relu rnn_tanh", recurrent_layers, by_value=True),
    Row("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell", recurrent_cell, "input hx"),
)

add_rows(ROWS)
