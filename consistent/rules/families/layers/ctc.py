"""Rule of ctc_loss: the samples of a batch may be split; time and classes stay whole."""

from __future__ import annotations

import torch

from ....spec import P, S
from ...notation import NONE
from ...signature import Call, Operand, Out, Signature
from ...table import Row, add_rows

_NAMES = "log_probs targets input_lengths target_lengths blank reduction zero_infinity"


def ctc(call: Call, parts: int) -> list[Signature]:
    """Return signatures of ctc_loss: samples are split.

    Targets are split with them if they have a row per sample. The lengths, a few numbers, are B.
    """
    x, targets = call.operands[0], call.get("targets")
    if x.ndim != 3:
        return [call.whole()]
    ins = {0: S(1), **({targets.index: S(0)} if targets.ndim == 2 else {})}
    out = S(0) if call.get("reduction", 1) == NONE else P
    return [call.whole(), call.make(ins, out, "ctc_loss")]


def ctc_outs(call: Call) -> list[Out] | None:
    """Return the output of ctc_loss, one loss per sample or one in all; None leaves it to torch.

    Torch itself reads the lengths, which meta tensors do not hold.
    """
    x = call.operands[0]
    if not isinstance(x, Operand) or x.ndim != 3:
        return None
    sizes = x.shape[1:2] if call.get("reduction", 1) == NONE else ()
    return [Out(torch.Size(sizes), x.spec.dtype)]


ROWS = (Row("ctc_loss", ctc, _NAMES, outs=ctc_outs),)

add_rows(ROWS)
