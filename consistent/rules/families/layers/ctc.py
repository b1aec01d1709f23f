"""Rule of ctc_loss: the samples of a batch may be split; time and classes stay whole."""

from __future__ import annotations

import torch

from ....spec import P, S
from ...notation import NONE
from ...signature import Call, Operand, Out, Signature
from ...table import Row, add_rows

_PARAMS = "log_probs targets input_lengths target_lengths blank reduction zero_infinity"


def ctc_loss(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of ctc_loss: the batch is split.

    Log-probabilities are (time, batch, classes), so they are S(1). Targets are split if they have a
    row per sample. Lengths, a few numbers, are B. The loss is P, or S(0) without a reduction.
    """
    x, targets = call.operands[0], call.get("targets")
    if x.ndim != 3:
        return [call.broadcast_signature()]
    ins = {0: S(1), **({targets.index: S(0)} if targets.ndim == 2 else {})}
    out = S(0) if call.get("reduction", 1) == NONE else P
    return [call.broadcast_signature(), call.new_signature(ins, out, "ctc_loss")]


def ctc_loss_outs(call: Call) -> list[Out] | None:
    """Return the output of ctc_loss: one loss per sample, or one in all.

    Torch cannot tell on meta tensors, since it reads the lengths. None, for a call of other shapes,
    leaves the output to torch.
    """
    x = call.operands[0]
    if not isinstance(x, Operand) or x.ndim != 3:
        return None
    sizes = x.shape[1:2] if call.get("reduction", 1) == NONE else ()
    return [Out(torch.Size(sizes), x.spec.dtype)]


ROWS = (Row("ctc_loss", ctc_loss, _PARAMS, outs=ctc_loss_outs),)

add_rows(ROWS)
