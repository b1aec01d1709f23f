"""Rules of elementwise ops: a dim that is split in one operand may be split in all.

P passes through linear ops, and P(max) and P(min) through increasing or decreasing ones.
"""

from __future__ import annotations

from ....spec import EXTREMES, B, P
from ... import notation
from ...signature import Call, Signature
from ...table import Row, add_rows
from ..indexing import data_dependent
from . import monotone


def and_or(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of and/or: all operands are split along the same dim of the result.

    Operands that are bools may also be P(max) or P(min), see ``monotone.and_or_of_bools``.
    """
    signatures = notation.signatures_of_text("f(...*) -> ...", call, parts)
    return signatures + monotone.and_or_of_bools(call)


def fill(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of fill and zero, which overwrite x: it may be split along any dim.

    Out of place only the shape of x is read, so x may be partial: ``P -> B``. In place x keeps its
    SBP: ``P -> P`` for zeros, and ``P(max) -> P(max)`` for any value.
    """
    signatures = notation.signatures_of_text("f(...*) -> ...", call, parts)
    if not call.inplace:
        return signatures + [call.new_signature({0: p}, B) for p in (P, *EXTREMES)]
    kept_partials = (P, *EXTREMES) if call.name == "zero" else EXTREMES
    return signatures + [call.new_signature({0: p}, p) for p in kept_partials]


def where(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of where(condition, x, y): all operands are split along one dim.

    If x and y are both P, the result is P. ``where(condition)`` alone has the signatures of
    nonzero.
    """
    if data_dependent.nonzero_outs(call):
        return data_dependent.nonzero(call, parts)
    signatures = notation.signatures_of_text("f(...*) -> ...", call, parts) + monotone.where(call)
    if len(call.operands) == 3:
        signatures.append(call.new_signature({1: P, 2: P}, P))
    return signatures


# Neither linear nor monotone in any operand.
_NONLINEAR = """
abs absolute acos acosh angle arccos arccosh arcsin arctan2 arctanh asin atan2 atanh
bitwise_left_shift bitwise_right_shift bitwise_xor celu copysign cos cosh digamma elu eq erfinv
float_power floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal gt hardshrink
hardswish heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal
lcm ldexp le leaky_relu less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
logical_xor logit lt mish mvlgamma nan_to_num ne nextafter not_equal polygamma pow _prelu_kernel
reciprocal remainder rsqrt sgn sign signbit silu sin sinc softplus softshrink special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erfcx
special_erfinv special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_ndtr special_logit special_ndtri special_psi special_sinc special_xlog1py special_xlogy
special_zeta sqrt square tan threshold xlogy
"""

# An op rises if it keeps the order of all numbers, infinities included; one that falls reverses it.
_RISING = """
arcsinh arctan asinh atan ceil clamp clamp_max clamp_min clip erf exp exp2 expm1 fix floor
hardsigmoid hardtanh relu relu6 round selu sigmoid sinh special_erf special_exp2 special_expit
special_expm1 special_ndtr special_round tanh trunc
"""

_PAIR = "input other"

ROWS = (
    Row(
        "_to_copy alias bfloat16 clone conj conj_physical contiguous detach double float half "
        "resolve_conj resolve_neg",
        "... -> ...; rises",
    ),
    Row(_NONLINEAR, "f(...*) -> ...", composite=True),
    Row(_RISING, "f(...*) -> ...; rises", composite=True),
    Row("erfc special_erfc", "f(...) -> ...; falls", composite=True),
    Row(
        "bitwise_and bitwise_or logical_and logical_or", and_or,
        composite=True, any_size=True, numbers="*",
    ),
    Row("maximum", "max(..., ...) -> ...", _PAIR, composite=True),
    Row("minimum", "min(..., ...) -> ...", _PAIR, composite=True),
    Row("bitwise_not logical_not", "f(...) -> ...; falls", composite=True),
    Row("add sub subtract rsub", "... + ... -> ...", _PAIR, extremes=monotone.add_scalar),
    Row("addcdiv", "... + ..., 1/(...) -> ...", "input tensor1 tensor2"),
    Row("addcmul", "... + ..., ... -> ...", "input tensor1 tensor2"),
    Row("bool int long short char byte", "f(...) -> ...; rises"),
    Row("copy", "shape(...), ... -> ...", "input src"),
    Row(
        "div divide true_divide",
        ("f(..., ...) -> ...; if rounding_mode", "..., 1/(...) -> ..."),
        f"{_PAIR} rounding_mode", extremes=monotone.scale_by_scalar,
    ),
    Row("empty_like ones_like zeros_like", "shape(...) -> ..."),
    Row("fill zero", fill, any_size=True, numbers="*"),
    Row("full_like", "shape(...) -> ..."),
    Row("frexp", "f(...) -> ..., ..."),
    Row("lerp", "... + ..., f(...) -> ...", "input end weight"),
    Row("masked_fill", "..., f(...) + ... -> ...; rises", "input mask value"),
    Row("mul multiply", "..., ... -> ...", _PAIR, extremes=monotone.scale_by_scalar),
    Row("deg2rad positive rad2deg", "... -> ...; rises"),
    Row("neg negative", "... -> ...; falls"),
    Row("prelu", ("f(nc..., c) -> nc...", "f(n, [c]) -> n"), "input weight"),
    Row("imag real", "... -> ..."),
    Row("view_as_real", "... -> ...[c]"),
    Row("where", where, outs=data_dependent.nonzero_outs, any_size=True, numbers="*"),
)  # fmt: skip

add_rows(ROWS)
