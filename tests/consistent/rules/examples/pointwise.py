"""Calls that prove the rows of consistent/rules/elementwise.py: one or more for every name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.brute_force import Example, example, fixed
from tests.consistent.rules.examples.numbers import complex_, real, truth, unit, whole

_nn = torch._C._nn


def _find(name: str) -> Callable[..., Any]:
    for home in (torch.Tensor, torch, torch._C._nn):
        if hasattr(home, name):
            return getattr(home, name)
    if name.startswith("special_"):
        return getattr(torch.special, name.removeprefix("special_"))
    return getattr(torch.ops.aten, name)


# Of one tensor, values in (0.05, 0.95), where all of them are defined.
ONE = """
abs absolute acos angle arccos arcsin arcsinh arctan arctanh asin asinh atan atanh ceil celu cos
cosh deg2rad digamma
erf erfc erfinv exp exp2 expm1 fix floor frac frexp gelu hardsigmoid hardswish hardtanh i0
isfinite isinf isnan
isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish
nan_to_num rad2deg
reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus
special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf
special_erfc special_erfcx
special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e
special_i1 special_i1e
special_log1p special_log_ndtr special_logit special_ndtr special_ndtri special_psi special_round
special_sinc sqrt
square tan tanh trunc positive neg negative contiguous clone detach double float half bfloat16
bool int long short char
byte conj conj_physical resolve_conj resolve_neg alias isnan elu hardshrink softshrink
""".split()

# Of two tensors that broadcast.
TWO = """
arctan2 atan2 copysign eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt
heaviside hypot igamma
igammac isclose le less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt
maximum minimum ne
nextafter not_equal pow remainder special_xlog1py special_xlogy xlogy add sub subtract rsub div
divide true_divide
mul multiply
""".split()

INTEGERS = "bitwise_and bitwise_or bitwise_xor gcd lcm".split()


def _by_name() -> Iterator[Example]:
    for name in ONE:
        function = _find(name)
        values = unit(5, 7)
        yield example(
            function, *((values, 0.5) if name in ("hardshrink", "softshrink") else (values,))
        )
    for name in TWO:
        # The derivative of igamma by its first argument is not known to torch.
        first = fixed(unit(5, 7)) if name in ("igamma", "igammac") else unit(5, 7)
        yield example(_find(name), first, unit(7))
        yield example(_find(name), first, fixed(unit(5, 1)))
    for name in INTEGERS:
        yield example(_find(name), whole(5, 7, low=1), whole(7, low=1))


EXAMPLES = (
    *_by_name(),
    *(
        example(f, real(5, 7), 2.0)
        for f in (torch.add, torch.sub, torch.mul, torch.div, torch.rsub, torch.pow)
    ),
    example(torch.pow, 2.0, unit(5, 7)),
    *(
        example(f, whole(5, 7, low=1), whole(7, low=1))
        for f in (torch.add, torch.mul, torch.div, torch.floor_divide)
    ),
    *(
        example(f, complex_(5, 7))
        for f in (torch.real, torch.imag, torch.view_as_real, torch.conj, torch.abs)
    ),
    *(
        example(getattr(torch.Tensor, name), unit(5, 7), unit(7))
        for name in ("add_", "sub_", "mul_", "div_", "pow_", "copy_", "clamp_min_", "lt_", "fmod_")
    ),
    *(
        example(getattr(torch.Tensor, name), unit(5, 7))
        for name in ("abs_", "exp_", "relu_", "sigmoid_", "neg_")
    ),
    example(torch.Tensor.add_, unit(5, 7), 3),
    example(torch.Tensor.mul_, unit(5, 7), 3),
    example(torch.Tensor.zero_, unit(5, 7)),
    example(torch.Tensor.fill_, unit(5, 7), 2),
    example(torch.fill, unit(5, 7), 2),
    example(torch.fill, unit(5, 7), unit()),
    example(torch.Tensor.masked_fill_, unit(5, 7), truth(5, 7), 2),
    example(torch.masked_fill, unit(5, 7), truth(7), 2.0),
    example(torch.masked_fill, unit(5, 7), truth(5, 1), unit()),
    example(torch.masked_fill, unit(7), truth(5, 7), 0.0),
    example(torch.Tensor.bitwise_left_shift, whole(5, 7, low=0), whole(7, low=0, high=3)),
    example(torch.Tensor.bitwise_right_shift, whole(5, 7, low=0), 1),
    example(torch.bitwise_not, whole(5, 7)),
    example(torch.add, real(5, 7), real(7), alpha=3),
    example(torch.add, whole(5, 7), real(7)),
    example(torch.add, real(5, 7), real()),
    example(torch.add, real(2, 1, 5), real(3, 1)),
    example(torch.div, real(5, 7), unit(7), rounding_mode="floor"),
    example(torch.div, whole(5, 7), 3),
    example(torch.mul, real(5, 7), real(5, 1)),
    example(torch.mul, real(5, 7), truth(5, 7)),
    example(torch.mul, real(), real(5)),
    example(torch.addcmul, real(5, 7), real(7), real(5, 1), value=2),
    example(torch.addcdiv, real(5, 7), real(7), unit(5, 1), value=2),
    example(torch.Tensor.addcmul_, real(5, 7), real(7), real(5, 1)),
    example(torch.Tensor.addcdiv_, real(5, 7), real(7), unit(5, 1)),
    example(torch.lerp, real(5, 7), real(5, 7), 0.3),
    example(torch.lerp, real(5, 7), real(7), unit(5, 1)),
    example(torch.Tensor.lerp_, real(5, 7), real(5, 7), 0.3),
    example(torch.where, truth(5, 7), real(5, 7), real(7)),
    example(torch.where, truth(7), real(5, 7), 0.0),
    example(torch.where, truth(5, 1), 1.0, real(7)),
    example(torch.clamp, real(5, 7), -0.5, 0.5),
    example(torch.clamp, real(5, 7), real(7), None),
    example(torch.clamp_max, real(5, 7), 0.5),
    example(torch.clamp_min, real(5, 7), 0.5),
    example(torch.clip, real(5, 7), max=0.5),
    example(torch.acosh, 1 + unit(5, 7)),
    example(torch.arccosh, 1 + unit(5, 7)),
    example(torch.atanh, unit(5, 7)),
    example(torch.ldexp, real(5, 7), whole(7, low=0, high=3)),
    example(torch.mvlgamma, 3 + unit(5, 7), 2),
    example(torch.polygamma, 2, unit(5, 7)),
    example(torch.special.zeta, fixed(2 + unit(5, 7)), unit(7)),
    example(torch._prelu_kernel, real(5, 7), unit(1, 7)),
    *(
        example(torch.prelu, x, w)
        for x in (real(5, 7), real(2, 5, 3))
        for w in (real(x.shape[1]), real(1))
    ),
    example(torch.prelu, real(7), real(1)),
    example(torch._C._nn.hardtanh, real(5, 7), -0.5, 0.5),
    example(torch.threshold, unit(5, 7), 0.1, 20.0),
    example(_nn.gelu, real(5, 7), approximate="tanh"),
    example(torch.ops.aten._to_copy, real(5, 7), dtype=torch.float32),
    example(torch.ops.aten._to_copy, whole(5, 7), dtype=torch.float32),
    example(torch.ops.aten._to_copy, real(5, 7), dtype=torch.int32),
    *(example(f, real(5, 7)) for f in (torch.zeros_like, torch.ones_like)),
    example(torch.empty_like, real(5, 0)),
    example(torch.full_like, real(5, 7), 3.0),
)
