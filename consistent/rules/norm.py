"""Normalizations: dims without statistics over them split freely, the others by the form that
joins statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..spec import P, S, Sbp
from .signature import Call, Operand, Signature
from .table import Row, add_rows


def index_of(call: Call, name: str) -> int | None:
    """Which operand the argument ``name`` is; None if it is left out."""
    given = call.get(name)
    return given.index if isinstance(given, Operand) else None


def _with(call: Call, names: str, entry: Sbp) -> dict[int, Sbp]:
    """``entry`` for each of the arguments ``names`` that is given."""
    found = (index_of(call, name) for name in names.split())
    return {i: entry for i in found if i is not None}


def _statistics_bytes(call: Call, dims: Sequence[int]) -> int:
    shape = call.operands[0].shape
    rest = math.prod(n for d, n in enumerate(shape) if d not in dims)
    return 4 * rest * call.operands[0].spec.dtype.itemsize


def layer(call: Call, parts: int) -> list[Signature]:
    """layer_norm and rms_norm: statistics over the last dims, which weight and bias share."""
    ndim = call.operands[0].ndim
    lead = ndim - len(call.get("normalized_shape"))
    affine = "weight" if "bias" not in call.params else "weight bias"
    made = [call.whole()] + [call.make({0: S(d)}, S(d)) for d in range(lead)]
    nbytes = _statistics_bytes(call, range(lead, ndim))
    for d in range(lead, ndim):
        ins = {0: S(d), **_with(call, affine, S(d - lead))}
        outs = (S(d), *call.whole().outs[1:])
        made.append(call.make(ins, outs, call.name.removeprefix("native_"), nbytes))
    if index_of(call, "weight") is not None and len(call.outs) == 1:
        made.append(call.make(_with(call, affine, P), P))
    return made


def group(call: Call, parts: int) -> list[Signature]:
    """group_norm: samples are apart; statistics join a group's channels and positions."""
    made = [call.whole(), call.make({0: S(0)}, S(0))]
    nbytes = 4 * call.operands[0].shape[0] * call.get("num_groups") * call.outs[0].dtype.itemsize
    apart = call.get("num_groups") % call.operands[0].spec.placement.size == 0
    ins = {0: S(1), **_with(call, "weight bias", S(0))}
    made.append(call.make(ins, S(1), "group_norm", 0 if apart else nbytes))
    for d in range(2, call.operands[0].ndim):
        made.append(call.make({0: S(d)}, S(d), "group_norm", nbytes))
    if index_of(call, "weight") is not None:
        made.append(call.make(_with(call, "weight bias", P), P))
    return made


def apart(call: Call, dim: int, names: str) -> list[Signature]:
    """``dim`` split, and the vectors ``names`` with it. Torch takes no empty shard: there is a
    piece for every rank."""
    if call.operands[0].shape[dim] < call.operands[0].spec.placement.size:
        return []
    return [call.make({0: S(dim), **_with(call, names, S(0))}, S(dim))]


_BY_CHANNEL = "weight bias running_mean running_var"


def batch(call: Call, parts: int) -> list[Signature]:
    """batch_norm: channels are apart; in training the statistics are those of the whole batch."""
    dims = [d for d in range(call.operands[0].ndim) if d != 1]
    training = call.get("training")
    form = "batch_norm" if training else None
    nbytes = _statistics_bytes(call, dims) if training else 0
    made = [call.whole(), *apart(call, 1, _BY_CHANNEL)]
    return made + [call.make({0: S(d)}, S(d), form, nbytes) for d in dims]


def instance(call: Call, parts: int) -> list[Signature]:
    """instance_norm: statistics over the positions of one sample and channel."""
    made = [call.whole(), *apart(call, 1, _BY_CHANNEL)]
    if index_of(call, "running_mean") is not None:
        return made  # running statistics are means over the samples
    nbytes = _statistics_bytes(call, range(2, call.operands[0].ndim))
    made += apart(call, 0, "")
    return made + [
        call.make({0: S(d)}, S(d), "instance_norm", nbytes) for d in range(2, call.operands[0].ndim)
    ]


def updated(call: Call) -> tuple[int, ...]:
    """The running statistics, where the op takes new ones."""
    takes = call.get("training" if call.name == "batch_norm" else "use_input_stats")
    return tuple(_with(call, "running_mean running_var", P)) if takes else ()


_LAYER = "input normalized_shape weight bias eps"
_BATCH = f"input {_BY_CHANNEL}"

ROWS = (
    Row("batch_norm", batch, f"{_BATCH} training momentum eps", writes=updated),
    Row("group_norm", group, "input num_groups weight bias eps"),
    Row("instance_norm", instance, f"{_BATCH} use_input_stats momentum eps", writes=updated),
    # The Python functions of these names only call the op.
    Row("layer_norm native_layer_norm", layer, _LAYER, composite=True),
    Row("rms_norm", layer, "input normalized_shape weight eps", composite=True),
)

add_rows(ROWS)
