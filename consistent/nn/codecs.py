"""Check and set up the codecs by which a plan compresses gathers and gradient sums."""

from __future__ import annotations

from typing import Any

import torch

from mirrored.codecs import CODECS

from ..autograd.coded_sums import set_codec
from ..dispatch.plans.shards import is_global
from ..movement.coders import Coder, codec_if_smaller, codec_named
from ..movement.low_rank import LowRank
from ..movement.world import my_coordinate
from ..spec import B, Partial, Placement
from ..spec.nearest import suggestion
from .plan import Layouts, Plan


def coder_of(param: Any, layouts: Layouts) -> Coder | None:
    """Return the codecs for gathering ``param`` and for reducing its gradient.

    None if its layouts name no codec, if it is not gathered along exactly one placement axis, or
    on a rank outside its placement.
    """
    axis = _gathered_axis(layouts)
    if axis is None or my_coordinate(param._spec.placement) is None:
        return None
    dtype = param._spec.dtype
    whole_shape = param._spec.with_sbp(layouts.use).local_shape(
        my_coordinate(param._spec.placement)
    )
    gather, reduce = (
        codec_if_smaller(codecs[axis], dtype, whole_shape) if codecs else None
        for codecs in (layouts.gather, layouts.reduce)
    )
    return None if gather is None and reduce is None else Coder(gather, reduce, whole_shape)


def _gathered_axis(layouts: Layouts) -> int | None:
    """Return the one placement axis along which a tensor is gathered for its use.

    None if it is gathered along no axis, or along several.
    """
    axes = [a for a, (e, used) in enumerate(zip(layouts.sbp, layouts.use)) if e != used]
    return axes[0] if len(axes) == 1 else None


def install_sum_codecs(module: torch.nn.Module, plan: Plan) -> None:
    """Make the all-reduces of replicated parameters' gradients use the codecs of ``plan``.

    ``parallelize`` calls this. Parameters that need no gradient are included, because they may
    need one later.
    """
    for name, param in module.named_parameters():
        layouts = plan.layouts(name)
        if layouts is None or not is_global(param):
            continue
        for axis in _coded_sum_axes(layouts):
            codec = layouts.reduce[axis]
            assert codec is not None
            set_codec(param, codec, axis)


def _coded_sum_axes(layouts: Layouts) -> list[int]:
    """Return the axes along which a gradient is all-reduced by a codec.

    On these axes the parameter is replicated (B), and ``layouts.reduce`` names a codec.
    """
    return [
        axis
        for axis, codec in enumerate(layouts.reduce)
        if codec is not None and all(getattr(layouts, n)[axis] is B for n in ("sbp", "use", "grad"))
    ]


def check_codecs(name: str, layouts: Layouts, placement: Placement, dtype: torch.dtype) -> None:
    """Raise if the codecs that ``layouts`` gives for the tensor ``name`` cannot be used.

    ``parallelize`` calls this for each tensor before anything changes.

    Args:
        name: the tensor's name, for the error.
        layouts: its layouts, with codecs in ``gather`` and ``reduce``.
        placement: its placement; an axis with one rank needs no codec.
        dtype: its dtype.

    Raises:
        ValueError: a codec is unknown, or does not fit the tensor's dtype or layouts.
    """
    entries = [(what, codec) for what in ("gather", "reduce") for codec in getattr(layouts, what)]
    codecs = [(what, codec) for what, codec in entries if codec is not None]
    if not codecs:
        return
    options = ", ".join(f"{what}={codec!r}" for what, codec in codecs)
    for what, codec in codecs:
        known_codec = codec_named(codec)
        if known_codec is None or (what == "gather" and isinstance(known_codec, LowRank)):
            raise ValueError(
                f"parallelize: {options} is said of {name!r}, and there is no codec {codec!r} for "
                f"{what}.{suggestion(codec, CODECS)} Codecs are {', '.join(CODECS)}, and for "
                "reduce powersgd:4, say, of any rank, or powersgd:16:int8, whose thin matrices are "
                "sent by a codec."
            )
    reason = _reason_not_usable(layouts, placement, dtype)
    if reason is not None:
        raise ValueError(
            f"parallelize: {options} is said of {name!r}, and {reason}.\n"
            "  A codec rounds floats of a tensor that lies split along one axis and is gathered "
            "for its use, or the gradient of one that lies whole along an axis.\n"
            "  Leave the codec out for this tensor, by a pattern of a Plan or by a plan without it."
        )


def _reason_not_usable(layouts: Layouts, placement: Placement, dtype: torch.dtype) -> str | None:
    """Return why a tensor's codecs cannot be used, as a part of an error; None if they can."""
    if not dtype.is_floating_point:
        return f"its numbers are {str(dtype).removeprefix('torch.')}, which a codec does not round"
    if any(isinstance(e, Partial) for e in (*layouts.sbp, *layouts.use)):
        return "it lies as P: its value is a sum of which no rank could round its addend exactly"
    axes = [
        axis
        for axis, (entry, used) in enumerate(zip(layouts.sbp, layouts.use, strict=True))
        if entry != used and placement.shape[axis] > 1
    ]
    if len(axes) > 1:
        return f"it is gathered along {len(axes)} axes, {axes}"
    summed = [axis for axis in _coded_sum_axes(layouts) if placement.shape[axis] > 1]
    if len(summed) > 1:
        return f"its gradient is summed by codecs along {len(summed)} axes, {summed}"
    for what in ("gather", "reduce"):
        for axis, codec in enumerate(getattr(layouts, what)):
            if codec is None or placement.shape[axis] == 1 or axis in axes:
                continue
            if what == "reduce" and axis in summed:
                continue
            return f"it is not gathered along axis {axis}, where it lies as {layouts.sbp[axis]}"
    if axes and (not layouts.sbp[axes[0]].is_split or layouts.use[axes[0]] is not B):
        return f"it goes from {layouts.sbp[axes[0]]} to {layouts.use[axes[0]]} for its use"
    if axes and layouts.sbp[axes[0]].cut is not None:  # type: ignore[attr-defined]
        return f"it lies as {layouts.sbp[axes[0]]}, whose items change their order on the way"
    return None
