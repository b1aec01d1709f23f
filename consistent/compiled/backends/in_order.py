"""Fix of Inductor that keeps messages in the recorded order, so that ranks do not deadlock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._library.effects import EffectType
from torch._ops import OpOverload

from ..opaque import ORDERED

TAG = "messages in order"  # part of the cache key: code on disk without the fix is not reused


@functools.cache
def keep_in_order() -> None:
    """Make Inductor's scheduler run each message after the message that was recorded before it."""
    from torch._inductor.lowering import register_lowering

    for op in ORDERED:
        register_lowering(op, type_promotion_kind=None)(_after_the_last(op))


def _after_the_last(op: OpOverload) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower = fallback_handler(op, add_to_fallback_set=False)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        count = len(V.graph.operations)
        result = lower(*args, **kwargs)
        last = V.graph.effectful_ops.get(EffectType.ORDERED)
        if last is not None:
            for made in V.graph.operations[count:]:
                V.graph.additional_buffer_deps[made.get_operation_name()].add(last.get_name())
        return result

    return lowered
