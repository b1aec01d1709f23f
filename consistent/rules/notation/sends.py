"""Bytes per rank that forms send, by which the choice among signatures estimates their time.

A form that joins the ranks' results may leave the joined result split, unless it is among WHOLE.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...spec import S
from ..signature import Call, Signature

Bytes = Callable[[Signature, Call, int], int]

# Forms that sum small results over the ranks, so that every rank has the sums.
WHOLE = frozenset(
    """aminmax half_loss mean median_of_all nanmean order_statistic sum trace variance""".split()
)


def result_bytes(call: Call) -> int:
    """Return the bytes of all outputs of ``call``, unsharded."""
    return sum(out.shape.numel() * out.dtype.itemsize for out in call.outs)


def may_stay_split(form: str) -> bool:
    """Return whether ``form`` can leave its result split: each rank then joins only its part."""
    return form not in WHOLE


def joined_bytes(made: Signature, call: Call, parts: int) -> int:
    """Return the bytes per rank of a form that joins the results of ``parts`` ranks.

    It is one result from every other rank. Forms in WHOLE all-reduce the result instead, which
    counts as twice the result. A few forms have counts of their own (``_JOINED``).
    """
    count = _JOINED.get(made.form or "")
    if count is not None:
        return count(made, call, parts)
    return (2 if made.form in WHOLE else parts - 1) * result_bytes(call)


def sent_bytes(made: Signature, call: Call, parts: int) -> int:
    """Return the bytes per rank that a form sends, for forms that do not join results.

    They are 0, unless ``_SENT`` has a count for the form.
    """
    count = _SENT.get(made.form or "")
    return 0 if count is None else count(made, call, parts)


def digit_counts_bytes(made: Signature, call: Call, parts: int) -> int:
    """Return the bytes that ranks send to find an order statistic, such as a median.

    For each byte of the dtype, ranks all-reduce 256 counts for each element of the result.
    """
    each = call.outs[0].shape.numel() * 256 * 8 * call.operands[0].spec.dtype.itemsize
    return 2 * (parts - 1) * each // parts


def _softmax(made: Signature, call: Call, parts: int) -> int:
    """Return the bytes that ranks exchange for softmax along a split dim.

    They are a maximum and a sum of each row, all-reduced, or gathered if there are few ranks.
    """
    return min(4, parts - 1) * _of_one_index(call)


def _scanned(made: Signature, call: Call, parts: int) -> int:
    """Return the bytes of a scan (cumsum) along a split dim: the totals of every other rank."""
    out = call.outs[0]
    return (parts - 1) * result_bytes(call) // max(1, out.shape[call.dim()] if out.ndim else 1)


def _of_one_index(call: Call) -> int:
    """Return the bytes of the result at one index of the dim that the op acts along.

    Of a result [rows, n] along the last dim they are those of one element of each row.
    """
    out = call.outs[0]
    n = out.shape[call.dim()] if out.ndim else 1
    return out.shape.numel() // max(1, n) * out.dtype.itemsize


def _statistics(count: int, call: Call) -> int:
    """Return the bytes of the statistics of ``count`` normalized groups.

    They are two sums for each group, sent twice: there and back.
    """
    return 4 * count * call.operands[0].spec.dtype.itemsize


def _last_dims(made: Signature, call: Call, parts: int) -> int:
    shape = call.operands[0].shape
    return _statistics(math.prod(shape[: len(shape) - len(call.get("normalized_shape"))]), call)


def _groups(made: Signature, call: Call, parts: int) -> int:
    x, groups = call.operands[0], call.get("num_groups")
    if made.ins[0] is S(1) and groups % x.spec.placement.size == 0:
        return 0  # whole groups on every rank
    return _statistics(x.shape[0] * groups, call)


def _channels(made: Signature, call: Call, parts: int) -> int:
    return _statistics(call.operands[0].shape[1], call)


def _planes(made: Signature, call: Call, parts: int) -> int:
    return _statistics(math.prod(call.operands[0].shape[:2]), call)


def _range(made: Signature, call: Call, parts: int) -> int:
    """Return the bytes of the smallest and largest value, which histc exchanges if not given."""
    return 16 if call.get("min", 0) == call.get("max", 0) else 0


_SENT: dict[str, Bytes] = {
    "batch_norm": _channels,
    "cummax_or_cummin": _scanned,
    "cumprod": _scanned,
    "cumsum": _scanned,
    "group_norm": _groups,
    "histc": _range,
    "instance_norm": _planes,
    "layer_norm": _last_dims,
    "logcumsumexp": _scanned,
    "rms_norm": _last_dims,
    "softmax": _softmax,
}
_JOINED: dict[str, Bytes] = {
    "cosine_similarity": lambda made, call, parts: 3 * (parts - 1) * result_bytes(call),
    "median_of_all": digit_counts_bytes,
    "order_statistic": digit_counts_bytes,
}
