"""Floating-point operations of matmuls, convolutions and attention ("products"), from shapes.

Two tables say which op is which product: by the names of global ops (``layout_problem/costs.py``)
and by aten's functions (``auto/machines/flops.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]


def contraction(left: Shape, dim: int, out: Shape) -> int:
    """Return the flops of mm, linear, mv or dot: 2 for each output element and each summed item.

    ``left`` and ``out`` are the shapes of the left operand and of the result, and ``dim`` is the
    dim of ``left`` that is summed over: [m, k] @ [k, n] with ``dim`` 1 takes 2 * m * n * k.
    """
    return 2 * math.prod(out) * left[dim]


def einsum(left: Shape, right: Shape, out: Shape) -> int:
    """Return the flops of an einsum of two tensors, from their shapes and that of the result.

    The letters are not needed. Each letter is in two of the three tensors, so the product of the
    three numbers of elements is the square of the product of the letters' lengths.
    """
    return 2 * math.isqrt(math.prod(out) * math.prod(left) * math.prod(right))


def outer(out: Shape) -> int:
    """Return the flops of an outer product, or of any op with one multiplication per element."""
    return 2 * math.prod(out)


def grouped_matmul(left: Shape, right: Shape) -> int:
    """Return the flops of a grouped matmul.

    * [m, k] with [groups, k, n]: each row is multiplied with one of the matrices.
    * [k, m] with [k, n], both cut into groups along k: all groups together cost as much as one
      matmul without groups.
    """
    return 2 * math.prod(left) * right[-1]


def convolution(x: Shape, weight: Shape, out: Shape, transposed: bool) -> int:
    """Return the flops of a convolution.

    ``weight`` is [out, in / groups, ...], or [in, out / groups, ...] if transposed. Each element of
    the output (of the input, if transposed) is multiplied with one slice of ``weight``.
    """
    return 2 * math.prod(x if transposed else out) * math.prod(weight[1:])


def attention(query: Shape, key: Shape, value: Shape) -> int:
    """Return the flops of attention: queries times keys, and weights times values.

    Shapes are [..., heads, length, features]. If several heads of queries share one head of keys
    and values (grouped-query attention), it counts for each of them.
    """
    pairs = math.prod(query[:-1]) * key[-2]
    return 2 * pairs * (query[-1] + value[-1])


def attention_backward(query: Shape, key: Shape, value: Shape) -> int:
    """Return the flops of the backward of attention.

    It runs 5 matmuls, and forward runs 2: the weights are computed again, and each matmul of
    forward has two in backward.
    """
    pairs = math.prod(query[:-1]) * key[-2]
    return 2 * pairs * (3 * query[-1] + 2 * value[-1])
