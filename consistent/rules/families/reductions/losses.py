"""Rules of losses: rows or elements split freely.

Each rank sums the losses of its shard, so the sum is P. For a mean, a form divides by the number of
losses in all shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....spec import B, P, S
from ... import notation
from ...notation import NONE, SUM
from ...signature import Call, Out, Signature
from ...table import Row, add_rows


def class_dim(call: Call) -> int:
    """Return the dim of the classes in an input of shape (C) or (N, C, ...): 0 or 1."""
    return min(1, call.operands[0].ndim - 1)


def has_probabilities(call: Call) -> bool:
    """Return whether the target of cross_entropy has class probabilities, not a class index."""
    return call.operands[1].spec.dtype.is_floating_point


def _row_split_signatures(call: Call, form: str) -> list[Signature]:
    """Return the SBP signatures that split a loss over classes along any dim but the classes.

    Without a reduction the result is split. A sum or mean is P, or B in half precision. A mean, and
    any result in half precision, needs ``form``, which counts or adds over all ranks. A target of
    class indices lacks the class dim.
    """
    classes = class_dim(call)
    reduction = notation.reduction_of(call)
    signatures = [call.broadcast_signature()]
    for d in range(call.operands[0].ndim):
        if d != classes:
            row = d - (d > classes)
            ins = {0: S(d), 1: S(d if has_probabilities(call) else row)}
            if reduction == NONE:
                signatures.append(call.new_signature(ins, S(row)))
            elif call.outs[0].dtype in notation.HALVES:  # added in float32, and then rounded
                signatures.append(call.new_signature(ins, B, form, 16))
            elif reduction == SUM:
                signatures.append(call.new_signature(ins, P))
            else:
                signatures.append(call.new_signature(ins, P, form, 16))
    return signatures


def cross_entropy(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of cross_entropy of logits: rows or classes may be split.

    If classes are split, ranks exchange a few numbers for each row, such as its largest logit and
    the sum of exponentials, and no logits.
    """
    signatures, classes = _row_split_signatures(call, "cross_entropy"), class_dim(call)
    probabilities, logits = has_probabilities(call), call.operands[0]
    ins = {0: S(classes), 1: S(classes)} if probabilities else {0: S(classes)}
    numbers = 5 if probabilities or call.get("label_smoothing", 0.0) else 3
    rows = logits.shape.numel() // max(1, logits.shape[classes])
    nbytes = numbers * (parts - 1) * rows * max(4, logits.spec.dtype.itemsize)
    return signatures + [
        call.new_signature(ins, call.broadcast_signature().outs, "cross_entropy", nbytes)
    ]


def negative_log_likelihood(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of nll_loss: rows or classes may be split, and input P passes.

    A row's loss is minus one element of the input, so the loss is linear. If classes are split,
    ranks that lack the target's class add 0, and the result is P. Losses that are not summed and
    have weights do not pass P: an addend of 0 times an infinite weight is NaN.
    """
    signatures, class_splits = _row_split_signatures(call, "nll_loss"), {0: S(class_dim(call))}
    if call.outs[0].dtype in notation.HALVES and notation.reduction_of(call) != NONE:
        return signatures + [call.new_signature(class_splits, B, "nll_loss", 16)]
    signatures.append(call.new_signature(class_splits, P, "nll_loss"))
    if call.get("weight") is None or notation.reduction_of(call) != NONE:
        signatures.append(call.new_signature({0: P}, P))
    return signatures


_PAIR = "input target reduction"
_NLL = "input target weight reduction ignore_index"


def _loss_rules(rule: str, letter: str) -> tuple[str, str]:
    """Return two rules of a loss: one for half precision, and ``rule`` for other dtypes.

    In half precision the form "half_loss" adds the ranks' losses in float32 and rounds once, as
    torch does. ``letter`` is the dim that is summed.
    """
    return f"{rule}; {letter} joined by half_loss; if half", rule


_ELEMENTWISE_LOSS = _loss_rules("f(...*) -> loss(...)", "...")


def _one_sample_outs(call: Call) -> Sequence[Out] | None:
    """Return a 0-d loss as the output for one sample ``[c]``; None leaves the output to torch.

    Torch itself returns a 0-d loss, but its meta kernel gives shape ``[1]``.
    """
    (x, _) = call.operands
    return None if x.ndim > 1 else (Out(torch.Size(()), x.spec.dtype),)


ROWS = (
    Row("binary_cross_entropy", _ELEMENTWISE_LOSS, "input target weight reduction"),
    Row(
        "binary_cross_entropy_with_logits",
        _ELEMENTWISE_LOSS,
        "input target weight pos_weight reduction",
    ),
    Row(
        "cosine_embedding_loss",
        _loss_rules("f(n[d], n[d], n) -> loss(n)", "n"),
        "input1 input2 target margin reduction",
    ),
    Row("cross_entropy_loss", cross_entropy, f"{_NLL} label_smoothing"),
    Row("hinge_embedding_loss", _ELEMENTWISE_LOSS, "input target margin reduction"),
    Row("huber_loss smooth_l1_loss", _ELEMENTWISE_LOSS, f"{_PAIR} delta"),
    Row("kl_div l1_loss mse_loss soft_margin_loss", _ELEMENTWISE_LOSS, _PAIR),
    Row("margin_ranking_loss", _ELEMENTWISE_LOSS, "input1 input2 target margin reduction"),
    Row(
        "multi_margin_loss",
        _loss_rules("f(n[c], n, weight:[c]) -> loss(n)", "n"),
        "input target p margin weight reduction",
    ),
    Row(
        "multilabel_margin_loss",
        _loss_rules("f(n[c], n[c]) -> loss(n)", "n"),
        _PAIR,
        outs=_one_sample_outs,
    ),
    Row("nll_loss nll_loss2d nll_loss_nd", negative_log_likelihood, _NLL),
    Row("poisson_nll_loss", _ELEMENTWISE_LOSS, "input target log_input full eps reduction"),
    Row(
        "triplet_margin_loss",
        _loss_rules("f(n[d], n[d], n[d]) -> loss(n)", "n"),
        "anchor positive negative margin p eps swap reduction",
    ),
)

add_rows(ROWS)
