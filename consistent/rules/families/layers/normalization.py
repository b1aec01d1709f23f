"""Rules of normalizations: dims that are not normalized split freely, normalized dims by a form.

The form joins the ranks' sums to get mean and variance.
"""

from __future__ import annotations

import torch

from ...signature import Call, Operand, Out
from ...table import Row, add_rows


def last_dims(call: Call) -> tuple[int, ...]:
    """Return the dims that layer_norm or rms_norm normalizes, for the letter D of its rule.

    They are the last ones, one for each size in ``normalized_shape``: (4, 8) -> (-2, -1).
    """
    return tuple(range(-len(call.get("normalized_shape")), 0))


def updated_statistics(call: Call) -> tuple[int, ...]:
    """Return the indices of the running statistics among the operands, if the op updates them.

    Otherwise (), as in evaluation.
    """
    if not call.get("training" if call.name == "batch_norm" else "use_input_stats"):
        return ()
    statistics = (call.get(name) for name in ("running_mean", "running_var"))
    return tuple(x.index for x in statistics if isinstance(x, Operand))


def native_layer_norm_outs(call: Call) -> list[Out] | None:
    """Return the outputs (result, mean, 1 / deviation) of native_layer_norm on a CPU.

    None, on other devices, leaves them to torch's meta kernel, which gives the dtypes of CUDA. The
    CPU keeps the statistics of half-precision inputs in half precision, unless the weight is wider.
    """
    x, *others = call.operands
    if x.spec.placement.type != "cpu":
        return None
    outer_ndim = x.ndim - len(call.get("normalized_shape"))
    shape = torch.Size((*x.shape[:outer_ndim], *(1 for _ in x.shape[outer_ndim:])))
    statistics_dtype = next(
        (o.spec.dtype for o in others if o.spec.dtype is not x.spec.dtype), x.spec.dtype
    )
    statistics = Out(shape, statistics_dtype, non_differentiable=True)
    return [Out(x.shape, x.spec.dtype), statistics, statistics]


_STATISTICS = "weight:c!, bias:c!, running_mean:c!, running_var:c!"
_EACH_CHANNEL = f"f(nc!..., {_STATISTICS}) -> nc!..."
_BATCH = "input weight bias running_mean running_var"
_LAYER = "input normalized_shape weight bias eps"

ROWS = (
    # In training the statistics are those of the whole batch.
    Row(
        "batch_norm",
        (f"{_EACH_CHANNEL}; n... by batch_norm; if training", _EACH_CHANNEL),
        f"{_BATCH} training momentum eps",
        writes=updated_statistics,
    ),
    Row(
        "group_norm",
        "f(nc..., weight:c, bias:c) -> nc...; c... by group_norm",
        "input num_groups weight bias eps",
    ),
    # Running statistics are means over the samples, which then stay whole.
    Row(
        "instance_norm",
        (f"f([n]c![...], {_STATISTICS}) -> [n]c![...]; if running_mean",
         "f(n!c!..., weight:c!, bias:c!) -> n!c!...; ... by instance_norm"),
        f"{_BATCH} use_input_stats momentum eps",
        writes=updated_statistics,
    ),
    # The Python functions of these names only call the op.
    Row(
        "layer_norm", "f(...D, weight:D, bias:D) -> ...D; D by layer_norm", _LAYER,
        along=last_dims, composite=True,
    ),
    Row(
        "native_layer_norm", "f(...D, weight:D, bias:D) -> ...D, ..., ...; D by layer_norm",
        f"{_LAYER} keepdim=True", along=last_dims, composite=True, outs=native_layer_norm_outs,
    ),
    Row(
        "rms_norm", "f(...D, weight:D) -> ...D; D by rms_norm",
        "input normalized_shape weight eps", along=last_dims, composite=True,
    ),
)  # fmt: skip

add_rows(ROWS)
