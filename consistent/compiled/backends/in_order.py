"""Fix of Inductor that keeps messages in the recorded order, so that ranks do not deadlock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._library.effects import EffectType
from torch._ops import OpOverload

from ..opaque import ORDERED_OPS

TAG = "messages in order"  # part of the cache key: code on disk without the fix is not reused


@functools.cache
def keep_in_order() -> None:
    """Make Inductor's scheduler run each message after the message that was recorded before it."""
    from torch._inductor.lowering import register_lowering

    for op in ORDERED_OPS:
        register_lowering(op, type_promotion_kind=None)(_ordered_lowering(op))


def _ordered_lowering(op: OpOverload) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower = fallback_handler(op, add_to_fallback_set=False)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        count = len(V.graph.operations)
        result = lower(*args, **kwargs)
        last_message = V.graph.effectful_ops.get(EffectType.ORDERED)
        if last_message is not None:
            for operation in V.graph.operations[count:]:
                V.graph.additional_buffer_deps[operation.get_operation_name()].add(
                    last_message.get_name()
                )
        return result

    return lowered
