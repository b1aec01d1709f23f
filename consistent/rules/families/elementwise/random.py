"""Rules of random ops, whose values depend only on the logical index of each element.

So a tensor in any layout may be filled in place, and a dropout mask is split like its input; for a
given mask, dropout is linear and passes P. If this library cannot draw an op's numbers, the op runs
on gathered inputs on every rank, with the same seed.
"""

from __future__ import annotations

from ....spec import B, P
from ... import notation
from ...signature import Call, Out, Signature
from ...table import Row, add_rows


def draw_in_place(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of in-place draws (``x.uniform_()``): any dim of x may be split.

    Each rank draws the values of its own elements. x may be P too: the first rank then gets the
    values, and the others get zeros.
    """
    signatures = notation.signatures_of_text("f(...*) -> ...; by random_fill", call, parts)
    if len(call.operands) == 1 and call.inplace:
        signatures.append(call.new_signature({0: P}, P, "random_fill"))
    return signatures


def draw_normal(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of x.normal_() and torch.normal.

    All operands (mean and deviation) are split along the same dim as the result.
    """
    if call.inplace:
        return draw_in_place(call, parts)
    return notation.signatures_of_text("f(...*) -> ...; by normal_of", call, parts)


def draw_whole(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signature with every tensor B: each rank draws the whole result.

    The op runs by the form "seeded", which gives torch's own generator the same seed on every rank
    while the op runs.
    """
    return [call.new_signature({}, B, "seeded")]


def outs_like_first(call: Call) -> list[Out]:
    """Return one output with the shape and dtype of the first operand.

    It is for ops that torch, in some version, cannot run on meta tensors.
    """
    first = call.operands[0]
    return [Out(first.shape, first.spec.dtype)]


# Python functions and builtins of torch that draw from torch's own generator.
_WHOLE_OPS = """
fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
fractional_max_pool3d_with_indices multinomial poisson rrelu_with_noise rrelu_with_noise_functional
"""
_TRAIN = "input p=0.5 train=True"

ROWS = (
    Row(_WHOLE_OPS, "f([...]*) -> _*; by seeded", composite=True),
    # Torch has no meta kernels for these, or had none.
    Row(
        "_sample_dirichlet _standard_gamma binomial", "f([...]*) -> _*; by seeded",
        outs=outs_like_first,
    ),
    Row(
        "alpha_dropout feature_alpha_dropout",
        ("f(...) -> ...; by alpha_dropout; if train", "... -> ..."),
        _TRAIN,
    ),
    Row("bernoulli geometric", draw_in_place, "input p"),
    Row("cauchy", draw_in_place, "input median sigma"),
    Row("dropout", ("... -> ...; by dropout; if train", "... -> ..."), _TRAIN),
    Row("exponential", draw_in_place, "input lambd"),
    Row("feature_dropout", ("... -> ...; by feature_dropout; if train", "... -> ..."), _TRAIN),
    Row("log_normal", draw_in_place, "input mean std"),
    Row("native_dropout", "... -> ..., shape(...); by native_dropout", _TRAIN),
    Row("normal", draw_normal, "input mean std"),
    Row("rand_like randn_like", "shape(...) -> ...; by random_like", "input"),
    Row("randint_like", "shape(...) -> ...; by random_like", "input low high"),
    Row("random uniform", draw_in_place, "input from to"),
    Row("rrelu", ("f(...) -> ...; by rrelu; if training", "f(...) -> ..."),
        "input lower upper training"),
)  # fmt: skip

add_rows(ROWS)
