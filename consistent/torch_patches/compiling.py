"""``torch.compile`` leaves frames that meet global tensors to Python: they run eagerly.

Its tracer would take a global tensor for its shard. There is nothing to patch: the tracer, dynamo,
asks the class of each tensor that it meets for ``__torch_dispatch__``, and is answered by an
exception of its own which says "not this frame". A warning says once what to call instead, and with
``fullgraph=True``, which allows no such frame, an error does.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from ..tensor.global_tensor import GlobalTensor


class _AskedByTracer:
    """The attribute ``__torch_dispatch__`` of ``torch.Tensor``, unless dynamo asks."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        asking = sys._getframe(1)
        if asking.f_globals.get("__name__", "").startswith("torch._dynamo."):
            if asking.f_locals.get("value") is owner:
                return None  # code names the class, as in isinstance(), and has no tensor of it
            _skip_frame()
        return getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009  (no method to pyright)


# flex_attention compiles this function of its own, whatever its caller compiles.
_FLEX_ATTENTION = "_flex_attention_hop_wrapper"
_warned = False


def _skip_frame() -> None:
    global _warned
    import torch._dynamo.exc as exc
    import torch._dynamo.trace_rules as rules

    for package in ("consistent", "mirrored"):
        rules.add(package)  # adding it again does no harm
    whole = _traced_as_one_graph()
    if whole == _FLEX_ATTENTION:
        raise exc.Unsupported(
            "flex_attention: it was given a global tensor, and it runs only as torch.compile "
            "traces it, which would see this rank's shard only. Use "
            "F.scaled_dot_product_attention, with the mask or the scores to add as attn_mask; or "
            "give flex_attention x.full() or x.to_local()."
        )
    if whole is not None:
        raise exc.Unsupported(
            "torch.compile(fullgraph=True): this code meets a global tensor, of which the tracer "
            "would see this rank's shard only, so it cannot become one graph. Give the training "
            "step to consistent.compile, which compiles it with its messages; or leave "
            "fullgraph=True out, and it runs as it is written."
        )
    if not _warned:
        _warned = True
        warnings.warn(
            "torch.compile: code that meets global tensors runs as it is written. To compile it, "
            "give the training step to consistent.compile.",
            stacklevel=2,
        )
    raise exc.SkipFrame("a global tensor: this frame runs eagerly")


def _traced_as_one_graph() -> str | None:
    """The name of the function that dynamo traces, if it must become one graph."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        in_dynamo = frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
        if in_dynamo and frame.f_code.co_name == "_compile":
            given = frame.f_locals
            return given["code"].co_name if given.get("one_graph") else None
        frame = frame.f_back
    return None


def install() -> None:
    """Set the attribute; it belongs to our own class, so this is done at import."""
    GlobalTensor.__torch_dispatch__ = _AskedByTracer()  # type: ignore[assignment,method-assign]
