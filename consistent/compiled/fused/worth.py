"""Decision whether a sum over ranks and the ops after it are faster as one kernel.

It is based on measurements on the CPU (docs/compile.md), and on the cost model on CUDA, where
nothing has been measured yet.
"""

from __future__ import annotations

import torch

from ...movement.speeds import device_speeds

# Ops after the sum -> dtype -> bytes of the sum from which one kernel is faster than separate ops,
# by a tenth or more on 2 ranks. With other ops, one kernel is as fast, or slower.
_RMS = {torch.float32: 256 << 10}  # torch computes an RMS norm in five ops
_GELU = {torch.bfloat16: 1 << 20}
MIN_BYTES_ON_CPU: dict[tuple[str, ...], dict[torch.dtype, int]] = {
    ("rms_norm",): _RMS,
    ("residual", "rms_norm"): _RMS,
    ("gelu",): _GELU,
    ("bias", "gelu"): _GELU,
}


def is_fused_sum_faster(
    kind: str,
    ops: tuple[str, ...],
    nbytes: int,
    dtype: torch.dtype,
    ranks: int,
    device: str,
    *,
    one_by_one: bool,
    shared: bool,
) -> bool:
    """Return whether a sum over ranks and the ops after it are faster as one kernel than apart.

    The result is the same on all ranks for the same arguments.

    Args:
        kind: "all_reduce" or "reduce_scatter".
        ops: names of the ops after the sum, such as ("bias", "gelu").
        nbytes: bytes that a rank contributes to the sum.
        dtype, device: dtype of the sum, and type of its device.
        ranks: number of ranks.
        one_by_one: whether the ops would otherwise be one kernel each; a compiler makes one kernel
            of all of them.
        shared: whether ranks read each other's memory.
    """
    if device == "cpu":
        least_bytes = MIN_BYTES_ON_CPU.get(ops, {}).get(dtype)
        return one_by_one and least_bytes is not None and nbytes >= least_bytes
    other_ranks, is_all_reduce = ranks - 1, kind == "all_reduce"
    result_bytes = nbytes if is_all_reduce else nbytes // ranks
    sent_bytes = (2 if is_all_reduce else 1) * other_ranks * nbytes // ranks
    move_seconds = device_speeds(device).move_seconds
    # Each op reads and writes a tensor of ``result_bytes``.
    op_seconds = move_seconds(0, 2 * result_bytes)
    message = move_seconds(sent_bytes, result_bytes)
    unfused = message + op_seconds * (len(ops) if one_by_one else 1)
    # One kernel that reads the addends of all ranks, or, without shared memory, one kernel after
    # the message.
    read_bytes = other_ranks * nbytes if is_all_reduce else sent_bytes
    return (move_seconds(read_bytes, result_bytes) if shared else message + op_seconds) < unfused
