"""Losses: rows or elements split freely; a sum over them is P, and a mean is divided by the
logical count, by form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..spec import P, S, Split
from . import notation
from .elementwise import split_alike
from .signature import Call, RuleFunction, Signature
from .table import Row, add_rows

NONE, MEAN, SUM = 0, 1, 2


def reduction_of(call: Call) -> int:
    """NONE, MEAN or SUM: torch's enumeration, which its Python functions translate their words to.

    Raises:
        ValueError: it is left out, and the default, which differs between torch's bindings,
            cannot be told.
    """
    given = call.get("reduction")
    if given is not None:
        return given
    if call.outs[0].ndim:
        return NONE
    if call.operands[0].ndim > 1:
        return MEAN
    raise ValueError(f"{call.name}: a default reduction to one number or of one number")


def reduced(call: Call, made: Sequence[Signature], form: str, nbytes: int = 0) -> list[Signature]:
    """Signatures of the unreduced loss as the call reduces it."""
    reduction = reduction_of(call)
    if reduction == NONE:
        return list(made)
    by = (form, nbytes) if reduction == MEAN else (None, 0)
    return [
        replace(s, outs=(P,), form=by[0], nbytes=by[1]) if isinstance(s.outs[0], Split) else s
        for s in made
    ]


def elementwise(call: Call, parts: int) -> list[Signature]:
    """Operands that broadcast against each other."""
    return reduced(call, split_alike(call, parts), "mean_loss")


def rows(rule: str) -> RuleFunction:
    """One loss for each row of a matrix; vectors are one row and stay whole."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        if call.operands[0].ndim != 2:
            return [call.whole()]
        shapes = tuple(tuple(operand.shape) for operand in call.operands)
        return reduced(call, notation.signatures(rule, shapes, "none"), "mean_loss")

    return signatures


def class_dim(call: Call) -> int:
    """Where the classes lie in the input: (C), or (N, C, ...)."""
    return min(1, call.operands[0].ndim - 1)


def has_probabilities(call: Call) -> bool:
    """Whether the target of cross_entropy gives each class a probability, and not an index."""
    return call.operands[1].spec.dtype.is_floating_point


def _by_row(call: Call, form: str) -> list[Signature]:
    """Samples and positions split; the target has no class dim if it holds indices."""
    classes = class_dim(call)
    made = [call.whole()]
    for d in range(call.operands[0].ndim):
        if d != classes:
            row = d - (d > classes)
            made.append(call.make({0: S(d), 1: S(d if has_probabilities(call) else row)}, S(row)))
    return reduced(call, made, form, 16)


def cross_entropy(call: Call, parts: int) -> list[Signature]:
    """Of logits. Split classes: each row's largest and sums are joined, no logits move."""
    made, classes = _by_row(call, "cross_entropy"), class_dim(call)
    probabilities, logits = has_probabilities(call), call.operands[0]
    ins = {0: S(classes), 1: S(classes)} if probabilities else {0: S(classes)}
    numbers = 5 if probabilities or call.get("label_smoothing", 0.0) else 3
    rows = logits.shape.numel() // max(1, logits.shape[classes])
    nbytes = numbers * (parts - 1) * rows * max(4, logits.spec.dtype.itemsize)
    return made + [call.make(ins, call.whole().outs, "cross_entropy", nbytes)]


def negative_log_likelihood(call: Call, parts: int) -> list[Signature]:
    """Minus the target's entry of the input: linear in the input; ranks without the target's
    class add 0."""
    made = _by_row(call, "nll")
    return made + [call.make({0: S(class_dim(call))}, P, "nll"), call.make({0: P}, P)]


_PAIR = "input target reduction"
_NLL = "input target weight reduction ignore_index"

ROWS = (
    Row("binary_cross_entropy", elementwise, "input target weight reduction"),
    Row(
        "binary_cross_entropy_with_logits", elementwise, "input target weight pos_weight reduction"
    ),
    Row(
        "cosine_embedding_loss",
        rows("n[d], n[d], n -> n"),
        "input1 input2 target margin reduction",
    ),
    Row("cross_entropy_loss", cross_entropy, f"{_NLL} label_smoothing"),
    Row("hinge_embedding_loss", elementwise, "input target margin reduction"),
    Row("huber_loss smooth_l1_loss", elementwise, f"{_PAIR} delta"),
    Row("kl_div l1_loss mse_loss soft_margin_loss", elementwise, _PAIR),
    Row("margin_ranking_loss", elementwise, "input1 input2 target margin reduction"),
    Row("multi_margin_loss", rows("n[c], n, [c] -> n"), "input target p margin weight reduction"),
    Row("multilabel_margin_loss", rows("n[c], n[c] -> n"), _PAIR),
    Row("nll_loss nll_loss2d nll_loss_nd", negative_log_likelihood, _NLL),
    Row("poisson_nll_loss", elementwise, "input target log_input full eps reduction"),
    Row(
        "triplet_margin_loss",
        rows("n[d], n[d], n[d] -> n"),
        "anchor positive negative margin p eps swap reduction",
    ),
)  # fmt: skip

add_rows(ROWS)
