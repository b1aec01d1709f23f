"""Elementwise ops: a dim split in one operand may be split in all; what is linear passes P, what
is monotone passes P(max) and P(min)."""

from __future__ import annotations

from collections.abc import Callable

from ..spec import EXTREMES, B, P, S
from . import counted, monotone, notation
from .signature import Call, Operand, RuleFunction, Signature
from .table import Row, add_rows


def split_alike(call: Call, parts: int) -> list[Signature]:
    """Any number of operands that broadcast against each other, any number of outputs; nothing
    passes P."""
    left = ", ".join(["..."] * len(call.operands))
    right = ", ".join(["..."] * len(call.outs))
    shapes = tuple(tuple(operand.shape) for operand in call.operands)
    return list(notation.signatures(f"{left} -> {right}", shapes, "none"))


def linear(call: Call, parts: int) -> list[Signature]:
    """One operand, and f(x + y) = f(x) + f(y): P passes, unless rounding to a coarser kind makes
    it nonlinear."""
    made = split_alike(call, parts)
    source, result = call.operands[0].spec.dtype, call.outs[0].dtype
    rounded = source.is_floating_point or source.is_complex
    if result.is_floating_point or result.is_complex or not rounded:
        made.append(call.make({0: P}, P))
    return made


def also(
    rule: RuleFunction, monotone: Callable[[Call], list[Signature]] = monotone.rising
) -> RuleFunction:
    """``rule``, and what passes P(max) and P(min)."""
    return lambda call, parts: rule(call, parts) + monotone(call)


def additive(call: Call, parts: int) -> list[Signature]:
    """x + alpha * y: P if both are P; a number added to a P would be added once per rank."""
    made = split_alike(call, parts)
    if len(call.operands) == 2:
        made.append(call.make({0: P, 1: P}, P))
    return made


def product(call: Call, parts: int) -> list[Signature]:
    """x * y: P if one of them is P and the other a number or B."""
    made = split_alike(call, parts)
    made += [call.make({i: P}, P) for i in range(len(call.operands))]
    return made


def quotient(call: Call, parts: int) -> list[Signature]:
    """x / y: P over a number or B, as long as nothing is rounded."""
    made = split_alike(call, parts)
    over_tensor = isinstance(call.args[0], Operand) if call.args else True
    if (
        over_tensor
        and not call.kwargs.get("rounding_mode")
        and call.outs[0].dtype.is_floating_point
    ):
        made.append(call.make({0: P}, P))
    return made


def constant(call: Call, parts: int) -> list[Signature]:
    """The result has the shape of the operand and none of its values: S stays, P may become B
    for nothing."""
    return split_alike(call, parts) + [call.make({0: p}, B) for p in (P, *EXTREMES)]


def fill(call: Call, parts: int) -> list[Signature]:
    """Every element becomes a given one."""
    made = split_alike(call, parts)
    if not call.inplace:
        return made + [call.make({0: p}, B) for p in (P, *EXTREMES)]
    kept = (P, *EXTREMES) if call.name == "zero" else EXTREMES
    return made + [call.make({0: p}, p) for p in kept]


def chosen(call: Call, parts: int) -> list[Signature]:
    """where(condition, x, y): linear in x and y together; of a condition alone it is nonzero."""
    if counted.nonzero_outs(call):
        return counted.nonzero(call, parts)
    made = split_alike(call, parts) + monotone.chosen(call)
    if len(call.operands) == 3:
        made.append(call.make({1: P, 2: P}, P))
    return made


def lerp(call: Call, parts: int) -> list[Signature]:
    """x + w * (y - x): linear in x and y together."""
    return split_alike(call, parts) + [call.make({0: P, 1: P}, P)]


def plus_scaled(call: Call, parts: int) -> list[Signature]:
    """addcmul and addcdiv, x + y * z and x + y / z: linear in x and y together, and x and z
    where z multiplies."""
    made = split_alike(call, parts) + [call.make({0: P, 1: P}, P)]
    return made + [call.make({0: P, 2: P}, P)] if call.name == "addcmul" else made


def prelu(call: Call, parts: int) -> list[Signature]:
    """A slope for each channel, dim 1, or one for all."""
    x, slope = call.operands
    channels = 1 if x.ndim > 1 and slope.shape.numel() > 1 else None
    made = [call.whole()]
    for d in range(x.ndim):
        made.append(call.make({0: S(d), 1: S(0)} if d == channels else {0: S(d)}, S(d)))
    return made


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
""".split()


def broadcast_shape(call: Call) -> list[tuple[int, ...]] | None:
    """All operands broadcast to the shape of the one output; in place it is that of the first."""
    left = ", ".join(["..."] * len(call.operands))
    shapes = notation.out_shapes(f"{left} -> ...", [operand.shape for operand in call.operands])
    fits = shapes is None or not call.inplace or shapes[0] == tuple(call.operands[0].shape)
    return shapes if fits else None


ROWS = (
    Row(
        "_to_copy alias bfloat16 clone conj conj_physical contiguous detach double float half "
        "resolve_conj resolve_neg",
        also(linear, monotone.cast),
        shape=broadcast_shape,
    ),
    Row(" ".join(_NONLINEAR), split_alike, composite=True, shape=broadcast_shape),
    Row(" ".join(monotone.RISING), also(split_alike), composite=True, shape=broadcast_shape),
    Row(
        " ".join(monotone.FALLING),
        also(split_alike, monotone.falling),
        composite=True,
        shape=broadcast_shape,
    ),
    Row(
        "bitwise_and bitwise_or logical_and logical_or maximum minimum",
        also(split_alike, monotone.of_two),
        composite=True,
        shape=broadcast_shape,
    ),
    Row(
        "bitwise_not logical_not",
        also(split_alike, monotone.inverted),
        composite=True,
        shape=broadcast_shape,
    ),
    Row("add sub subtract rsub", also(additive, monotone.shifted), shape=broadcast_shape),
    Row("addcdiv addcmul", plus_scaled, shape=broadcast_shape),
    Row("bool int long short char byte", also(split_alike, monotone.cast), shape=broadcast_shape),
    Row("copy", additive, shape=broadcast_shape),
    Row("div divide true_divide", also(quotient, monotone.scaled), shape=broadcast_shape),
    Row("empty_like zeros_like ones_like", constant, shape=broadcast_shape),
    Row("fill zero", fill, shape=broadcast_shape),
    Row("full_like", fill, shape=broadcast_shape),
    Row("frexp", split_alike),
    Row("lerp", lerp, shape=broadcast_shape),
    Row("masked_fill", also(split_alike), shape=broadcast_shape),
    Row("mul multiply", also(product, monotone.scaled), shape=broadcast_shape),
    Row("deg2rad positive rad2deg", also(linear), shape=broadcast_shape),
    Row("neg negative", also(linear, monotone.negated), shape=broadcast_shape),
    Row("prelu", prelu),
    Row("real imag view_as_real", linear),
    Row(
        "where",
        chosen,
        shape=broadcast_shape,
        outs=counted.nonzero_outs,
    ),
)

add_rows(ROWS)
