"""The op that a thread is in, and its boxing: what a waiting rank reports about itself.

Both are read from the thread's frames when another rank asks, so that an op need not record
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from mirrored.transports.faults.place import is_users

from ...spec import TensorSpec
from ..plans.plan import Plan


def current_op(frames: Sequence[FrameType]) -> str:
    """``op, src -> dst`` of a thread, from its frames, innermost first; "" where it is in no op.

    Where no plan is under way, the op is the function of this library that the program called.
    """
    op = boxing = ""
    for frame in frames:
        if is_users(frame):
            break
        if not frame.f_globals.get("__name__", "").startswith("consistent."):
            continue
        names = frame.f_locals
        boxing, plan = boxing or _boxing(names), names.get("self")
        if isinstance(names.get("recorded_at"), str):  # a compiled step sends what a line of it did
            op = f"for {names['recorded_at']}"
            break
        if isinstance(plan, Plan):
            op = plan.name
            break
        op = frame.f_code.co_name
    return ", ".join(filter(None, (op, boxing)))


def _boxing(names: Mapping[str, Any]) -> str:
    """The boxing, or the first of several, that a frame with such variables carries out."""
    routes = names.get("routes")
    if isinstance(routes, Sequence) and routes:
        more = f" and {len(routes) - 1} more" if len(routes) > 1 else ""
        return _route(*routes[0]) + more
    src, dst = names.get("src"), names.get("dst")
    if isinstance(src, TensorSpec) and isinstance(dst, TensorSpec):
        return _route(src, dst)
    return ""


def _route(src: TensorSpec, dst: TensorSpec) -> str:
    """``src -> dst``, with what both have in common written once."""
    if src.placement != dst.placement:
        return f"{src} -> {dst}"
    before, on, placement = str(src).partition(" on ")
    after = dst.sbp[0] if len(dst.sbp) == 1 else dst.sbp
    return f"{before} -> {after}{on}{placement}"
