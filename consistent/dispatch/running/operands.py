"""Boxing of operands before an op runs.

If the transport sends while this rank computes, the operands of an op that need one collective each
are boxed together in one message, and the gradients of leaves among them are reduce-scattered while
backward goes on. Where ranks share memory nothing would overlap, and operands are boxed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...movement.boxed import box, box_several
from ...movement.several import Route, overlap_flags
from ...spec import Layout
from ...spec.tracer import callbacks

_HANDLE_ARRIVING = callbacks("handle_arriving")  # set by autograd/
_HANDLE_AHEAD = callbacks("handle_ahead")  # set by modules that prefetch operands


def box_operands(tensors: list, boxes: Sequence[tuple[int, Layout]]) -> None:
    """Box the operands in ``boxes``, (index in ``tensors``, target layout), before an op runs.

    Their plain shards in the new layouts replace them in ``tensors``.
    """
    routes: dict[int, Route] = {}
    for index, layout in boxes:
        src = tensors[index]._spec
        routes[index] = src, src.with_layout(layout)
    sent_indices = [
        index for index, it_travels in zip(routes, overlap_flags([*routes.values()])) if it_travels
    ]
    for index, route in routes.items():
        if index not in sent_indices:
            tensors[index] = box(tensors[index], *route)
    if sent_indices:
        _box_together(tensors, {index: routes[index] for index in sent_indices})


def _box_together(tensors: list, routes: dict[int, Route]) -> None:
    """Box the operands whose boxing is one message that travels while this rank computes.

    ``routes`` are (source spec, target spec) by index in ``tensors``. Some of the messages may have
    been received in advance, if an earlier op prefetched them.
    """
    prefetched, prefetch_next = [None] * len(routes), None
    if _HANDLE_AHEAD:
        operands = [tensors[index] for index in routes]
        prefetched, prefetch_next = _HANDLE_AHEAD[-1](operands, list(routes.values()))
    arrived = {index: x for index, x in zip(routes, prefetched, strict=True) if x is not None}
    remaining = [index for index in routes if index not in arrived]
    arriving = _HANDLE_ARRIVING[-1] if _HANDLE_ARRIVING else None
    for positions, received in ((list(arrived), list(arrived.values())), (remaining, None)):
        if positions:
            operands, group_routes = [tensors[i] for i in positions], [routes[i] for i in positions]
            boxed = box_several(operands, group_routes, received, arriving)
            for i, x in zip(positions, boxed, strict=True):
                tensors[i] = x
    # Prefetch for the next op only after the operands of this one were requested.
    if prefetch_next is not None:
        prefetch_next()
