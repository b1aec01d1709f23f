"""Further elementwise ops: special functions, dtype changes by other names, and the backward of
activations, which is linear in the gradient."""

from __future__ import annotations

from ..spec import P, S
from .elementwise import broadcast_shape, linear, split_alike
from .signature import Call, Out, Signature
from .table import Row, add_rows


def linear_in_first(call: Call, parts: int) -> list[Signature]:
    """The gradient, which comes first, may be P; the rest of an activation's backward is B."""
    return [*split_alike(call, parts), call.make({0: P}, P)]


def of_two_parts(call: Call, parts: int) -> list[Signature]:
    """complex(real, imag): linear in both together."""
    return [*split_alike(call, parts), call.make({0: P, 1: P}, P)]


def of_softmax(call: Call, parts: int) -> list[Signature]:
    """The backward of softmax and log_softmax, (gradient, result): ``dim`` is whole."""
    dims = [d for d in range(call.operands[0].ndim) if d != call.dim()]
    made = [call.whole(), *(call.make({0: S(d), 1: S(d)}, S(d)) for d in dims)]
    return [*made, call.make({0: P}, P)]


def like_first(call: Call) -> list[Out]:
    """One output like the first operand, where torch has no run on meta tensors."""
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
    Row(_BACKWARD, linear_in_first),
    Row("_log_softmax_backward_data _softmax_backward_data", of_softmax, "grad output dim"),
    Row("_conj _conj_physical _neg_view cdouble cfloat chalf", linear, shape=broadcast_shape),
    Row(_FUNCTIONS + _POLYNOMIALS, split_alike, shape=broadcast_shape),
    Row("complex", of_two_parts, shape=broadcast_shape),
    Row("fake_quantize_per_tensor_affine", split_alike, outs=like_first),
    Row("polar", split_alike, shape=broadcast_shape),
    Row("view_as_complex", "...[c] -> ..."),
)

add_rows(ROWS)
