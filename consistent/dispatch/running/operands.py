"""Operands boxed before an op runs.

Where messages travel while this rank computes, those of one op that are gathered go in one message,
and gradients on their way back to leaves are reduced and scattered while backward goes on. Where
ranks share memory there is no link to keep busy, and each operand is boxed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...movement.boxed import Arriving, box, box_several
from ...movement.several import Route, travels
from ...spec import Layout

# What becomes of gradients that would be boxed on their way to leaves: autograd's, which is above.
arriving: list[Arriving] = []
# (operands, routes) -> what was sent for in advance and has arrived, and what sends for the next
# ones: that of modules, which are above.
ahead: list[Callable[[list, list[Route]], tuple[list[Tensor | None], Callable[[], None]]]] = []


def box_operands(tensors: list, boxes: Sequence[tuple[int, Layout]]) -> None:
    """Put the plain shards of those operands that are boxed first in their places."""
    routes: dict[int, Route] = {}
    for index, layout in boxes:
        src = tensors[index]._spec
        routes[index] = src, src.with_layout(layout)
    sent = [index for index, route in routes.items() if travels(*route)]
    for index, route in routes.items():
        if index not in sent:
            tensors[index] = box(tensors[index], *route)
    if sent:
        _box_sent(tensors, {index: routes[index] for index in sent})


def _box_sent(tensors: list, routes: dict[int, Route]) -> None:
    """Those whose messages travel while this rank computes."""
    come, go_on = [None] * len(routes), None
    if ahead:
        come, go_on = ahead[0]([tensors[index] for index in routes], list(routes.values()))
    arrived = {index: x for index, x in zip(routes, come, strict=True) if x is not None}
    left = [index for index in routes if index not in arrived]
    for positions, there in ((list(arrived), list(arrived.values())), (left, None)):
        if positions:
            given, along = [tensors[i] for i in positions], [routes[i] for i in positions]
            made = box_several(given, along, there, next(iter(arriving), None))
            for i, x in zip(positions, made, strict=True):
                tensors[i] = x
    if go_on is not None:
        go_on()
