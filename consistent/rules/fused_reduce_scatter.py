"""Detection of ops that are fused with the reduce-scatter that boxes their operand from P to S.

This is done only where it was measured to be faster (docs/benchmarks.md): for rms_norm, which torch
runs in several passes, on shards so large that the passes take most of the time. For gelu, silu and
layer_norm it is as fast as torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..boxing.plan import plan
from ..boxing.steps import Move
from ..spec import P, TensorSpec
from .signature import Call, Operand

FORM = "fused_reduce_scatter"
MIN_SHARD_BYTES = 1 << 21  # bytes of a rank's shard from which on fusing is faster
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fused_axes(
    call: Call, specs: Sequence[TensorSpec], boxed_specs: Sequence[TensorSpec]
) -> tuple[int, ...] | None:
    """Return the axes whose boxing is fused with ``call``; None if the call is not fused.

    Planning calls this after it has chosen layouts. The call is fused if its first operand is boxed
    from ``specs[0]`` to ``boxed_specs[0]`` with a reduce-scatter as the last step, and if the op is
    one that gains from it. The answer depends on specs alone, so every rank gets the same.

    Args:
        specs: specs of the operands before boxing.
        boxed_specs: specs of the operands after boxing.
    """
    src, dst = specs[0], boxed_specs[0]
    if src is dst or len(call.outs) != 1 or not _is_fused_op(call):
        return None
    if src.layout.is_cut or dst.layout.is_cut:
        return None
    out = call.outs[0]
    same_dtype = all(operand.spec.dtype is src.dtype for operand in call.operands)
    if not same_dtype or src.dtype not in _FUSED_DTYPES or out.dtype is not src.dtype:
        return None
    if out.shape != src.shape or src.nbytes < MIN_SHARD_BYTES * src.placement.size:
        return None
    # The op is fused with the last step of the boxing, which must be a reduce-scatter of sums.
    moves = plan(src, dst)
    last = moves[-1]
    if not isinstance(last, Move) or last.kind != "reduce_scatter" or last.src is not P:
        return None
    return tuple(a for a, (x, y) in enumerate(zip(src.sbp, dst.sbp, strict=True)) if x is not y)


def _is_fused_op(call: Call) -> bool:
    """Return whether ``call`` is an rms_norm of its first operand, the only op that is fused."""
    if call.name != "rms_norm" or not (call.args and isinstance(call.args[0], Operand)):
        return False
    return call.args[0].index == 0 and len(call.get("normalized_shape")) > 0
