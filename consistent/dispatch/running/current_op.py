"""The op that a thread is in, and its boxing: what a waiting rank reports about itself.

Both are read from the thread's frames when another rank asks, so that an op need not record
anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

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
        src, dst, plan = names.get("src"), names.get("dst"), names.get("self")
        if not boxing and isinstance(src, TensorSpec) and isinstance(dst, TensorSpec):
            boxing = _route(src, dst)
        if isinstance(names.get("recorded_at"), str):  # a compiled step sends what a line of it did
            op = f"for {names['recorded_at']}"
            break
        if isinstance(plan, Plan):
            op = plan.name
            break
        op = frame.f_code.co_name
    return ", ".join(filter(None, (op, boxing)))


def _route(src: TensorSpec, dst: TensorSpec) -> str:
    """``src -> dst``, with what both have in common written once."""
    if src.placement != dst.placement:
        return f"{src} -> {dst}"
    before, on, placement = str(src).partition(" on ")
    after = dst.sbp[0] if len(dst.sbp) == 1 else dst.sbp
    return f"{before} -> {after}{on}{placement}"
