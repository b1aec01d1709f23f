"""Rules of further elementwise ops: special functions, casts, and the backward of activations.

The backward of an activation is linear in the gradient, so it passes P of the gradient.
"""

from __future__ import annotations

from ...signature import Call, Out
from ...table import Row, add_rows


def outs_like_first(call: Call) -> list[Out]:
    """Return one output like the first operand, for ops that torch cannot run on meta tensors."""
    return [Out(call.operands[0].shape, call.operands[0].spec.dtype)]


_POLYNOMIALS = """
special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w
"""

_FUNCTIONS = """
special_airy_ai special_gammainc special_gammaincc special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
special_multigammaln special_polygamma special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_spherical_bessel_j0
"""

_BACKWARD = """
elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward
hardtanh_backward leaky_relu_backward logit_backward mish_backward sigmoid_backward silu_backward
softplus_backward softshrink_backward tanh_backward threshold_backward
"""

ROWS = (
    Row(_BACKWARD, "f(...*) -> ..."),
    Row(
        "_log_softmax_backward_data _softmax_backward_data",
        "f(...[D], ...[D]) -> ...[D]",
        "grad output dim",
    ),
    Row("_conj _conj_physical _neg_view cdouble cfloat chalf", "... -> ..."),
    Row(_FUNCTIONS + _POLYNOMIALS, "f(...*) -> ..."),
    Row("complex", "... + ... -> ...", "real imag"),
    Row("fake_quantize_per_tensor_affine", "f(...*) -> ...", outs=outs_like_first),
    Row("polar", "f(..., ...) -> ...", "abs angle"),
    Row("view_as_complex", "...[c] -> ..."),
)

add_rows(ROWS)
