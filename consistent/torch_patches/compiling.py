"""Graph breaks for ``torch.compile`` at frames that use global tensors: these frames run eagerly.

Dynamo would trace a global tensor as its shard. No patch is needed: dynamo reads
``__torch_dispatch__`` of the class of each tensor that it traces, and here this raises dynamo's own
exception for "skip this frame". A warning says once what to call instead. With ``fullgraph=True``,
which allows no such frame, an error says so instead.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from ..tensor.global_tensor import GlobalTensor


class _FrameSkipper:
    """Descriptor for ``__torch_dispatch__`` that makes dynamo skip frames that use global tensors.

    Dynamo reads this attribute of the class of each tensor that it traces; the read raises dynamo's
    own exception for that. Any other reader gets the attribute of ``torch.Tensor``.
    """

    def __get__(self, instance: Any, owner: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith("torch._dynamo."):
            if caller.f_locals.get("value") is owner:
                return None  # the code only names the class, as in isinstance()
            _skip_frame()
        return getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009  (no method to pyright)


_warned = False


def _skip_frame() -> None:
    """Raise dynamo's exception to run a frame eagerly, or an error if it must be compiled."""
    global _warned
    import torch._dynamo.exc as exc
    import torch._dynamo.trace_rules as rules

    for package in ("consistent", "mirrored"):
        rules.add(package)  # dynamo skips its frames; adding it again does no harm
    if _is_full_graph():
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


def _is_full_graph() -> bool:
    """Return whether the frame that dynamo traces must become one graph (``fullgraph=True``)."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        in_dynamo = frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
        if in_dynamo and frame.f_code.co_name == "_compile":
            return bool(frame.f_locals.get("one_graph"))
        frame = frame.f_back
    return False


def install() -> None:
    """Give ``GlobalTensor`` the ``__torch_dispatch__`` by which dynamo skips its frames.

    The class belongs to this library, so this is done at import.
    """
    GlobalTensor.__torch_dispatch__ = _FrameSkipper()  # type: ignore[assignment,method-assign]
