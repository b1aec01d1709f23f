"""Matmuls for tensor parallelism that overlap with communication; users call them.

| function | x | w | y | backward of x |
| --- | --- | --- | --- | --- |
| all_gather_matmul | S(0) | S(1) | S(-1) | matmul, reduce-scatter |
| matmul_reduce_scatter | S(-1) | S(0) | S(0) | all-gather, matmul |
| matmul_all_reduce | S(-1) | S(0) | B | all-reduce, matmul |

y = activation(x @ w + bias). The table shows the layouts on the axis of the placement that
communicates: S(d) is split along dim d, B replicated. On the other axes, the operands may have any
layouts that a matmul accepts, such as x S(0) and w B.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch.planning import autocast
from ..dispatch.plans.shards import HookOff, adopt, attach, compare, is_global, plain
from ..forms.native.reduce_shards import ACTIVATIONS
from ..movement import check_mode
from ..spec import B, NdSbp, P, Placement, S, Sbp, Split, TensorSpec
from .chunked_matmul import Boxing, box_multiply, chunk_count, multiply_box


def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    chunks: int | None = None,
) -> Any:
    """Return ``activation(x @ w + bias)``; ``x`` is gathered while it is multiplied.

    It is gathered on the axes of the placement on which ``w`` is split by columns, S(1).

    ```
    rank 0    a  @  w0            a @ w0                    x   [..., k]  S(d)
              b        --->       b @ w0                    w   [k, n]    S(1)
                                                            y   [..., n]  S(-1)
    rank 1    b  @  w1            a @ w1
              a                   b @ w1
    ```

    Rows (dim 0 of ``x``) are sent in chunks: while one chunk is sent, another is multiplied. The
    gradient of ``x`` is a matmul whose result is reduce-scattered in as many chunks. Plain tensors
    count as replicated.

    Args:
        x: global tensor ``[..., k]``.
        w: global tensor ``[k, n]``.
        bias: global tensor ``[n]``.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        chunks: number of chunks. None means as many as pay off: on CPU one chunk, unless every rank
            has a core to spare and a chunk is not too small (the first such call is a collective).

    Raises:
        ValueError: shapes or layouts do not fit, or there is no axis on which ``w`` is S(1) and
            ``x`` is split.
    """
    return _gather_and_multiply("all_gather_matmul", (x, w, bias), activation, chunks)


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    dim: int = 0,
    activation: str = "none",
    chunks: int | None = None,
) -> Any:
    """Return ``activation(x @ w + bias)``; the ranks' partial sums are reduce-scattered.

    ```
    rank 0    x0 @ w0            rows 0.. of the sum        x   [..., k]  S(-1)
                         --->                               w   [k, n]    S(0)
    rank 1    x1 @ w1            rows ..n of the sum        y   [..., n]  S(dim)
    ```

    Rows are summed in chunks: while one chunk is summed, another is multiplied. The gradient of
    ``x`` is the gathered gradient of ``y`` times ``w.T``, in as many chunks. The arguments are
    those of ``all_gather_matmul``, and one more.

    Args:
        dim: the dim of the result that is split over the ranks.

    Raises:
        ValueError: shapes or layouts do not fit, or no axis has x S(-1) and w S(0).
    """
    return _multiply_and_sum("matmul_reduce_scatter", (x, w, bias), dim, activation, chunks)


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    chunks: int | None = None,
) -> Any:
    """Return ``activation(x @ w + bias)``; the ranks' partial sums are all-reduced.

    ```
    rank 0    x0 @ w0            x0 @ w0 + x1 @ w1          x   [..., k]  S(-1)
                         --->                               w   [k, n]    S(0)
    rank 1    x1 @ w1            x0 @ w0 + x1 @ w1          y   [..., n]  B
    ```

    Arguments and chunks work as in ``all_gather_matmul``. The gradient of ``x`` is the summed
    gradient of ``y`` times ``w.T``.

    Raises:
        ValueError: shapes or layouts do not fit, or no axis has x S(-1) and w S(0).
    """
    return _multiply_and_sum("matmul_all_reduce", (x, w, bias), None, activation, chunks)


def _gather_and_multiply(name: str, tensors: tuple, activation: str, chunks: int | None) -> Any:
    """Check the operands of ``all_gather_matmul``, and compute it."""
    x, w, bias = _operands(name, tensors, activation, chunks)
    gathered_sbp = tuple(
        B if isinstance(x_entry, Split) and w_entry == S(1) else x_entry
        for x_entry, w_entry in zip(x._spec.sbp, w._spec.sbp, strict=True)
    )
    if gathered_sbp == x._spec.sbp:
        raise _misfit_error(name, x, w, "no axis has w S(1) and x split, so nothing is gathered")
    specs = x._spec, x._spec.with_sbp(gathered_sbp)
    out = _product_spec(name, x, w, gathered_sbp)
    return _run_product(name, box_multiply, specs, out, (x, w, bias), activation, chunks)


def _multiply_and_sum(
    name: str, tensors: tuple, dim: int | None, activation: str, chunks: int | None
) -> Any:
    """Check the operands of a matmul whose partial sums are reduced, and compute it.

    The result is split along ``dim``, or replicated if that is None.
    """
    x, w, bias = _operands(name, tensors, activation, chunks)
    if dim is not None and not -x.ndim <= dim < x.ndim:
        raise _misfit_error(name, x, w, f"dim={dim} is not one of the {x.ndim} dims of the result")
    result_entry = B if dim is None else S(dim % x.ndim)
    src = _product_spec(name, x, w, x._spec.sbp)
    dst = src.with_sbp(tuple(result_entry if entry is P else entry for entry in src.sbp))
    if dst is src:
        raise _misfit_error(
            name, x, w, "no axis has x S(-1) and w S(0), so there is nothing to sum"
        )
    return _run_product(name, multiply_box, (src, dst), dst, (x, w, bias), activation, chunks)


def _run_product(
    name: str,
    run: Any,
    specs: tuple[TensorSpec, TensorSpec],
    out: TensorSpec,
    tensors: tuple,
    activation: str,
    chunks: int | None,
) -> Any:
    """Compute a matmul of global tensors by ``run``, which accepts shards; return a global tensor.

    Args:
        name: name of the function that the user called.
        run: ``box_multiply`` or ``multiply_box``.
        specs: specs before and after the boxing.
        out: spec of the result.
        tensors: (x, w, bias).
        activation: name of the activation.
        chunks: number of chunks, or None for the best one.
    """
    x, w, bias = tensors
    if bias is not None:
        bias = bias.to_global(sbp=tuple(S(0) if _splits_last_dim(e, out) else B for e in out.sbp))
        bias = plain(bias)
    check_mode.set_current_op(name)
    boxing = Boxing(*specs, chunk_count(*specs) if chunks is None else chunks, activation)
    # The shards below are plain tensors, whose ops must not be dispatched as ops on global tensors.
    with HookOff():
        return attach(run(boxing, plain(x), plain(w), bias), out)


def _splits_last_dim(entry: Sbp, spec: TensorSpec) -> bool:
    """Return whether ``entry`` splits the last dim of a tensor with ``spec``."""
    return isinstance(entry, Split) and entry.dim == spec.ndim - 1


def _product_spec(name: str, x: Any, w: Any, x_sbp: NdSbp) -> TensorSpec:
    """Return the spec of ``x @ w`` if ``x`` has the SBPs ``x_sbp``, each axis by itself.

    x S(-1) with w S(0) gives P, x S(d) with w B gives S(d), and x B with w S(1) gives S(-1).

    Raises:
        ValueError: the SBPs of x and w on some axis do not fit each other.
    """
    last, entries = x.ndim - 1, []
    for x_entry, w_entry in zip(x_sbp, w._spec.sbp, strict=True):
        if isinstance(x_entry, Split) and x_entry.dim == last and w_entry == S(0):
            entries.append(P)
        elif isinstance(x_entry, Split) and x_entry.dim < last and w_entry is B:
            entries.append(x_entry)
        elif x_entry is B and w_entry == S(1):
            entries.append(S(last))
        elif B in (x_entry, w_entry) and (x_entry is P or w_entry is P or x_entry is w_entry):
            entries.append(P if P in (x_entry, w_entry) else B)
        else:
            raise _misfit_error(
                name, x, w, f"x {x_entry} and w {w_entry} on one axis have no product there"
            )
    shape = (*x.shape[:-1], w.shape[1])
    return TensorSpec.of(x.placement, tuple(entries), shape, x.dtype)


def _operands(
    name: str, tensors: tuple, activation: str, chunks: int | None
) -> tuple[Any, Any, Any]:
    """Return (x, w, bias) as checked global tensors on one placement, in autocast's dtype."""
    global_tensors = [t for t in tensors if is_global(t)]
    if not global_tensors:
        raise TypeError(
            f"{name}: x, w and bias are plain tensors.\n  Nothing says how ranks hold them.\n"
            "  Give global tensors (consistent.distribute), or call x @ w."
        )
    placement: Placement = global_tensors[0].placement
    for t in global_tensors:
        if t.placement != placement:
            raise ValueError(
                f"{name}: the operands are on different placements.\n"
                f"  One is {global_tensors[0]._spec}, another is {t._spec}.\n"
                "  Move one of them first: t.to_global(placement=...)."
            )
    x, w, bias = (
        None if t is None else _cast_for_autocast(adopt(t, placement, name), placement)
        for t in tensors
    )
    for t in (x, w, bias):
        if t is not None and t._spec.layout.is_cut:
            raise ValueError(
                f"{name}: an operand is {t._spec}, and what is multiplied in chunks lies in "
                "balanced pieces. Box it first: t.to_global(sbp=S(dim)), or call x @ w."
            )
    _check_operands(name, x, w, bias, activation, chunks)
    for t in tensors:  # after all checks, so that a refused call sends nothing
        if t is not None:
            compare(t, placement, name)
    return x, w, bias


def _cast_for_autocast(x: Any, placement: Placement) -> Any:
    """Return ``x`` in the dtype in which autocast multiplies; unchanged if autocast is off."""
    kind = placement.type
    if autocast.is_on(kind) and autocast.is_cast(x.dtype):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _check_operands(
    name: str, x: Any, w: Any, bias: Any, activation: str, chunks: int | None
) -> None:
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise _misfit_error(name, x, w, "shapes must be [..., k] and [k, n]", "x @ w takes others")
    if bias is not None and tuple(bias.shape) != (w.shape[1],):
        why = f"bias has shape {tuple(bias.shape)}, and y has {w.shape[1]} columns"
        raise _misfit_error(name, x, w, why, "Give one number per column")
    if any(t is not None and t.dtype != x.dtype for t in (w, bias)):
        why = f"dtypes differ: {[str(t.dtype) for t in (x, w, bias) if t is not None]}"
        raise _misfit_error(name, x, w, why, "Convert one of them first")
    if activation not in ACTIVATIONS:
        names = ", ".join(f'"{each}"' for each in ACTIVATIONS)
        raise _misfit_error(
            name, x, w, f'activation="{activation}" is not known', f"Use one of {names}"
        )
    if chunks is not None and chunks < 1:
        raise _misfit_error(
            name, x, w, f"chunks={chunks} is less than 1", "Leave it out, or give 1"
        )


def _misfit_error(
    name: str, x: Any, w: Any, why: str, instead: str = "Box them first (to_global), or call x @ w"
) -> ValueError:
    return ValueError(f"{name}: {why}.\n  x is {x._spec}, w is {w._spec}.\n  {instead}.")
