"""Bytes per rank that forms send, by which the choice among signatures estimates their time.

A form that joins the ranks' results may leave the joined result split, unless it is among
UNSPLIT_FORMS.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...spec import S
from ..signature import Call, Signature

ByteCount = Callable[[Signature, Call, int], int]

# Forms that sum small results over the ranks, so that every rank has the sums.
UNSPLIT_FORMS = frozenset(
    """aminmax half_loss mean median_of_all nanmean order_statistic sum trace variance""".split()
)


def result_bytes(call: Call) -> int:
    """Return the bytes of all outputs of ``call``, unsharded."""
    return sum(out.shape.numel() * out.dtype.itemsize for out in call.outs)


def can_leave_result_split(form: str) -> bool:
    """Return whether ``form`` can leave its result split: each rank then joins only its part."""
    return form not in UNSPLIT_FORMS


def join_bytes(signature: Signature, call: Call, parts: int) -> int:
    """Return the bytes per rank of a form that joins the results of ``parts`` ranks.

    It is one result from every other rank. Forms in UNSPLIT_FORMS all-reduce the result instead,
    which counts as twice the result. A few forms have counts of their own (``_JOINED_BYTES``).
    """
    byte_count = _JOINED_BYTES.get(signature.form or "")
    if byte_count is not None:
        return byte_count(signature, call, parts)
    return (2 if signature.form in UNSPLIT_FORMS else parts - 1) * result_bytes(call)


def sent_bytes(signature: Signature, call: Call, parts: int) -> int:
    """Return the bytes per rank that a form sends, for forms that do not join results.

    They are 0, unless ``_SENT_BYTES`` has a count for the form.
    """
    byte_count = _SENT_BYTES.get(signature.form or "")
    return 0 if byte_count is None else byte_count(signature, call, parts)


def digit_counts_bytes(signature: Signature, call: Call, parts: int) -> int:
    """Return the bytes that ranks send to find an order statistic, such as a median.

    For each byte of the dtype, ranks all-reduce 256 counts for each element of the result.
    """
    nbytes = call.outs[0].shape.numel() * 256 * 8 * call.operands[0].spec.dtype.itemsize
    return 2 * (parts - 1) * nbytes // parts


def _softmax_bytes(signature: Signature, call: Call, parts: int) -> int:
    """Return the bytes that ranks exchange for softmax along a split dim.

    They are a maximum and a sum of each row, all-reduced, or gathered if there are few ranks.
    """
    return min(4, parts - 1) * _bytes_of_one_index(call)


def _scan_bytes(signature: Signature, call: Call, parts: int) -> int:
    """Return the bytes of a scan (cumsum) along a split dim: the totals of every other rank."""
    out = call.outs[0]
    return (parts - 1) * result_bytes(call) // max(1, out.shape[call.dim()] if out.ndim else 1)


def _bytes_of_one_index(call: Call) -> int:
    """Return the bytes of the result at one index of the dim that the op acts along.

    Of a result [rows, n] along the last dim they are those of one element of each row.
    """
    out = call.outs[0]
    n = out.shape[call.dim()] if out.ndim else 1
    return out.shape.numel() // max(1, n) * out.dtype.itemsize


def _statistics_bytes(count: int, call: Call) -> int:
    """Return the bytes of the statistics of ``count`` normalized groups.

    They are two sums for each group, sent twice: there and back.
    """
    return 4 * count * call.operands[0].spec.dtype.itemsize


def _layer_norm_bytes(signature: Signature, call: Call, parts: int) -> int:
    shape = call.operands[0].shape
    return _statistics_bytes(
        math.prod(shape[: len(shape) - len(call.get("normalized_shape"))]), call
    )


def _group_norm_bytes(signature: Signature, call: Call, parts: int) -> int:
    x, groups = call.operands[0], call.get("num_groups")
    if signature.ins[0] is S(1) and groups % x.spec.placement.size == 0:
        return 0  # whole groups on every rank
    return _statistics_bytes(x.shape[0] * groups, call)


def _batch_norm_bytes(signature: Signature, call: Call, parts: int) -> int:
    return _statistics_bytes(call.operands[0].shape[1], call)


def _instance_norm_bytes(signature: Signature, call: Call, parts: int) -> int:
    return _statistics_bytes(math.prod(call.operands[0].shape[:2]), call)


def _histc_bytes(signature: Signature, call: Call, parts: int) -> int:
    """Return the bytes of the smallest and largest value, which histc exchanges if not given."""
    return 16 if call.get("min", 0) == call.get("max", 0) else 0


_SENT_BYTES: dict[str, ByteCount] = {
    "batch_norm": _batch_norm_bytes,
    "cummax_or_cummin": _scan_bytes,
    "cumprod": _scan_bytes,
    "cumsum": _scan_bytes,
    "group_norm": _group_norm_bytes,
    "histc": _histc_bytes,
    "instance_norm": _instance_norm_bytes,
    "layer_norm": _layer_norm_bytes,
    "logcumsumexp": _scan_bytes,
    "rms_norm": _layer_norm_bytes,
    "softmax": _softmax_bytes,
}
_JOINED_BYTES: dict[str, ByteCount] = {
    "cosine_similarity": lambda signature, call, parts: 3 * (parts - 1) * result_bytes(call),
    "median_of_all": digit_counts_bytes,
    "order_statistic": digit_counts_bytes,
}
