"""Operands boxed before an op runs.

Where messages travel while this rank computes, those of one op that are gathered go in one message,
and gradients on their way back to leaves are reduced and scattered while backward goes on. Where
ranks share memory there is no link to keep busy, and each operand is boxed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...movement.differentiable import box
from ...movement.several import Arriving, Route, box_several, travels
from ...spec import Layout

# What becomes of gradients that would be boxed on their way to leaves: autograd's, which is above.
arriving: list[Arriving] = []


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
        given, along = [tensors[index] for index in sent], [routes[index] for index in sent]
        made = box_several(given, along, arriving=next(iter(arriving), None))
        for index, x in zip(sent, made, strict=True):
            tensors[index] = x
