"""Calls that prove the rows of consistent/rules/special.py."""

from __future__ import annotations

import torch

from consistent.rules.families.elementwise import special
from tests.brute_force import example, fixed
from tests.consistent.rules.examples.numbers import complex_, real, unit, whole

_aten = torch.ops.aten

EXAMPLES = (
    *(
        example(getattr(_aten, n).default, whole(5, 1, low=0, high=4), unit(5, 4))
        for n in special._POLYNOMIALS.split()
    ),
    *(
        example(getattr(torch._C._special, n), unit(5, 4) + 3)
        for n in special._FUNCTIONS.split()
        if n
        not in (
            "special_gammainc",
            "special_gammaincc",
            "special_multigammaln",
            "special_polygamma",
        )
    ),
    *(
        example(f, unit(5, 4), unit(5, 1))
        for f in (torch.special.gammainc, torch.special.gammaincc)
    ),
    example(torch.special.multigammaln, unit(5, 4) + 3, 2),
    example(torch.special.polygamma, 1, unit(5, 4)),
    *(
        example(getattr(_aten, n).default, real(5, 4), real(5, 4), *a)
        for n, a in (
            ("gelu_backward", ()),
            ("hardshrink_backward", (0.5,)),
            ("hardsigmoid_backward", ()),
            ("hardswish_backward", ()),
            ("hardtanh_backward", (-1, 1)),
            ("leaky_relu_backward", (0.1, False)),
            ("mish_backward", ()),
            ("sigmoid_backward", ()),
            ("silu_backward", ()),
            ("softplus_backward", (1, 20)),
            ("softshrink_backward", (0.5,)),
            ("tanh_backward", ()),
            ("threshold_backward", (0,)),
        )
    ),
    example(_aten.elu_backward.default, real(5, 4), 1.0, 1.0, 1.0, False, real(5, 4)),
    example(_aten.logit_backward.default, real(5, 4), unit(5, 4)),
    *(example(f, real(5, 4)) for f in (torch.Tensor.cdouble, torch.Tensor.cfloat)),
    example(torch.Tensor.chalf, fixed(real(5, 4))),
    example(torch._conj, complex_(5, 4)),
    example(torch._neg_view, real(5, 4)),
    example(_aten._conj_physical.default, complex_(5, 4)),
    example(torch.complex, real(5, 4), real(5, 4)),
    example(torch.polar, unit(5, 1), real(5, 4)),
    example(torch.fake_quantize_per_tensor_affine, real(5, 4), 0.1, 0, -8, 8),
    *(
        example(getattr(_aten, n).default, real(5, 4), real(5, 4), 1, torch.float64)
        for n in ("_softmax_backward_data", "_log_softmax_backward_data")
    ),
    example(torch.view_as_complex, real(5, 4, 2)),
)
