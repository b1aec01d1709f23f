"""Random ops. Values are drawn by logical index, so any layout may be filled in place, and a
dropout mask splits like its input; given the mask, dropout is linear and passes P.

What has no drawing of ours runs whole on every rank, from a seed that is the same on all of them.
"""

from __future__ import annotations

from ..spec import B, P, Sbp
from . import elementwise, notation
from .signature import Call, Signature
from .table import Row, RuleFunction, add_rows


def fill(call: Call, parts: int) -> list[Signature]:
    """x.uniform_() and its kin: any layout of ``x``. Of a P tensor the first rank holds the values,
    the rest zeros."""
    made = _each_dim(call, "random_fill")
    if len(call.operands) == 1 and call.inplace:
        made.append(call.make({0: P}, P, "random_fill"))
    return made


def _each_dim(call: Call, form: str) -> list[Signature]:
    """All operands and outputs cut alike along each dim, broadcast dims aside, or all B."""
    left = ", ".join(["..."] * len(call.operands))
    right = ", ".join(["..."] * len(call.outs))
    shapes = tuple(tuple(operand.shape) for operand in call.operands)
    made = notation.signatures(f"{left} -> {right}", shapes, "none")
    return [Signature(s.ins, s.outs, form) for s in made]


def normal(call: Call, parts: int) -> list[Signature]:
    """x.normal_(mean, std), or torch.normal(mean, std) of tensors."""
    return fill(call, parts) if call.inplace else _each_dim(call, "normal_of")


def like(call: Call, parts: int) -> list[Signature]:
    """rand_like and its kin read a shape: a P operand serves as it is, and the values are B."""
    made = _each_dim(call, "random_like")
    return [*made, call.make({0: P}, B, "random_like")]


def masked(form: str, training: str, linear: bool = True) -> RuleFunction:
    """Dropout: nothing happens unless ``training``; a mask cut like the input does not depend on
    the layout."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        if call.get(training, True) is False and len(call.outs) == 1:
            return elementwise.linear(call, parts)
        made = _each_dim(call, form)
        if linear:
            entries: tuple[Sbp, ...] = (P,) + (B,) * (len(call.outs) - 1)
            made.append(call.make({0: P}, entries, form))
        return made

    return signatures


def rrelu(call: Call, parts: int) -> list[Signature]:
    """Slopes drawn by logical index in training; nonlinear."""
    if call.get("training", False):
        return _each_dim(call, "rrelu")
    return elementwise.split_alike(call, parts)


def whole(call: Call, parts: int) -> list[Signature]:
    """All B; torch's own generator is seeded alike on every rank while the op runs."""
    return [call.make({}, B, "seeded")]


# Python functions of torch that draw from torch's generator, and builtins that do.
_WHOLE = """
_sample_dirichlet _standard_gamma binomial fractional_max_pool2d fractional_max_pool2d_with_indices
fractional_max_pool3d fractional_max_pool3d_with_indices multinomial poisson rrelu_with_noise
rrelu_with_noise_functional
"""

ROWS = (
    Row(_WHOLE, whole, composite=True),
    Row("alpha_dropout", masked("alpha_dropout", "train", linear=False), "input p train"),
    Row("bernoulli", fill, "self p"),
    Row("cauchy", fill, "self median sigma"),
    Row("dropout", masked("dropout", "train"), "input p train"),
    Row("exponential", fill, "self lambd"),
    Row("feature_alpha_dropout", masked("alpha_dropout", "train", linear=False), "input p train"),
    Row("feature_dropout", masked("feature_dropout", "train"), "input p train"),
    Row("geometric", fill, "self p"),
    Row("log_normal", fill, "self mean std"),
    Row("native_dropout", masked("native_dropout", "train"), "input p train"),
    Row("normal", normal, "self mean std"),
    Row("rand_like randn_like", like, "self"),
    Row("randint_like", like, "self low high"),
    Row("random", fill, "self from to"),
    Row("rrelu", rrelu, "input lower upper training"),
    Row("uniform", fill, "self from to"),
)  # fmt: skip

add_rows(ROWS)
