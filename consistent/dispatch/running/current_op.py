"""The op and the boxing that a thread is in, as text for the report of a waiting rank.

Both are read from the thread's stack frames when another rank asks, so that ops record nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from mirrored.transports.faults.place import is_users

from ...spec import TensorSpec
from ..plans.plan import Plan


def current_op(frames: Sequence[FrameType]) -> str:
    """Return ``op, src -> dst`` for a thread with these frames, innermost first; "" if in no op.

    If no plan is running, the op is the function of this library that the program called.
    """
    op = boxing = ""
    for frame in frames:
        # Frames further out belong to the program, which may itself be called by an op.
        if is_users(frame):
            break
        if not frame.f_globals.get("__name__", "").startswith("consistent."):
            continue
        names = frame.f_locals
        boxing, plan = boxing or _boxing(names), names.get("self")
        # A compiled step communicates on behalf of the line of the program that was recorded.
        if isinstance(names.get("recorded_at"), str):
            op = f"for {names['recorded_at']}"
            break
        if isinstance(plan, Plan):
            op = plan.name
            break
        op = frame.f_code.co_name
    return ", ".join(filter(None, (op, boxing)))


def _boxing(names: Mapping[str, Any]) -> str:
    """Return the boxing ``src -> dst`` that a frame with the local variables ``names`` carries out.

    If there are several, the first is returned.
    """
    routes = names.get("routes")
    if isinstance(routes, Sequence) and routes:
        more = f" and {len(routes) - 1} more" if len(routes) > 1 else ""
        return _route(*routes[0]) + more
    src, dst = names.get("src"), names.get("dst")
    if isinstance(src, TensorSpec) and isinstance(dst, TensorSpec):
        return _route(src, dst)
    return ""


def _route(src: TensorSpec, dst: TensorSpec) -> str:
    """Return the text ``src -> dst``, in which parts that both specs share occur once."""
    if src.placement != dst.placement:
        return f"{src} -> {dst}"
    before, on, placement = str(src).partition(" on ")
    after = dst.sbp[0] if len(dst.sbp) == 1 else dst.sbp
    return f"{before} -> {after}{on}{placement}"
