"""The op and the boxing that a thread is in, as text for the report of a waiting rank.

Both are read from the thread's stack frames on another rank's request, so ops record nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from mirrored.transports.faults.place import is_user_frame

from ...spec import TensorSpec
from ..plans.plan import Plan


def current_op(frames: Sequence[FrameType]) -> str:
    """Return the op that a thread is in, with the boxing that it waits in, or "" if it is in no op.

    For example ``add, S(0) -> B`` with shape and placement. It is shown in the report of a rank
    that waits too long. ``frames`` are the stack frames of the thread, innermost first. If no plan
    is running, the op is the function of this library that the program called.
    """
    op = boxing = ""
    for frame in frames:
        # Frames further out belong to the program, which may itself be called by an op.
        if is_user_frame(frame):
            break
        if not frame.f_globals.get("__name__", "").startswith("consistent."):
            continue
        names = frame.f_locals
        boxing, plan = boxing or _boxing_text(names), names.get("self")
        # A compiled step communicates on behalf of the line of the program that was recorded.
        if isinstance(names.get("recorded_at"), str):
            op = f"for {names['recorded_at']}"
            break
        if isinstance(plan, Plan):
            op = plan.name
            break
        op = frame.f_code.co_name
    return ", ".join(filter(None, (op, boxing)))


def _boxing_text(names: Mapping[str, Any]) -> str:
    """Return ``src -> dst`` for the boxing in a stack frame, or "" if the frame is not of a boxing.

    ``names`` are the local variables of the frame. Of several boxings the first is shown.
    """
    routes = names.get("routes")
    if isinstance(routes, Sequence) and routes:
        more = f" and {len(routes) - 1} more" if len(routes) > 1 else ""
        return _route_text(*routes[0]) + more
    src, dst = names.get("src"), names.get("dst")
    if isinstance(src, TensorSpec) and isinstance(dst, TensorSpec):
        return _route_text(src, dst)
    return ""


def _route_text(src: TensorSpec, dst: TensorSpec) -> str:
    """Return the text ``src -> dst``; shape, dtype and placement occur once if both share them."""
    if src.placement != dst.placement:
        return f"{src} -> {dst}"
    before, on, placement = str(src).partition(" on ")
    after = dst.sbp[0] if len(dst.sbp) == 1 else dst.sbp
    return f"{before} -> {after}{on}{placement}"
