"""A graph apart from its numbers. Steps of other sizes are mostly the same ops in the same order.

```
%2 = view(%1, [12, 16])                    view(%1, [_, _])            12, 16
%3 = message([%2], 4781...)        -->     message([%2], _, [_, _])    4781..., 24, 16
%4 = div(%3, 264)                          div(%3, _)                  264
     graph                                 text                        numbers
```

The text also has what code depends on beside ops: of each input dtype, device, number of dims and
the order of its strides, which values share memory, and torch's modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..listing import is_item
from ..memory import storage_of
from ..opaque import DRAWN, MESSAGE, WAIT_MESSAGE, result_sizes

Number = int | float
_TOLD = (MESSAGE, WAIT_MESSAGE, DRAWN)


class Form(NamedTuple):
    """What a graph does, and with which numbers.

    Args:
        text: equal where graphs differ in numbers alone.
        numbers: those of the graph, and the sizes and strides of what it is given, in the order in
            which ``fill`` asks for them.
        constants: tensors that the graph holds.
    """

    text: Hashable
    numbers: tuple[Number, ...]
    constants: list[torch.Tensor]


def form_of(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Form | None:
    """The form of a graph for these inputs. None where inputs share memory that is written into:
    how they lie in it may then decide what is computed."""
    nodes = list(graph.graph.nodes)
    written = {memory for node in nodes for memory in node.meta.get("written", ())}
    memories = [storage_of(x) for x in inputs]
    given = (node.meta.get("memory") for node in nodes if node.op == "placeholder")
    for recorded, memory in zip(given, memories, strict=True):
        if recorded in written and memories.count(memory) > 1:
            return None
    numbers: list[Number] = []
    places = {node: i for i, node in enumerate(nodes)}

    def noted(number: Any) -> type:
        numbers.append(number)
        return type(number)

    constants = [_constant(graph, node) for node in nodes if node.op == "get_attr"]
    text: list[Any] = [_modes()]
    text += [(x.dtype, x.device, lies(x, noted)) for x in (*constants, *inputs)]
    text.append([memories.index(memory) for memory in memories])
    for node in nodes:
        args, kwargs = fill(node, noted, places.__getitem__)
        text.append((node.op, _target(node), args, kwargs))
    text.append(_together(nodes))
    return Form(_frozen(text), tuple(numbers), constants)


def fill(
    node: Node, number: Callable[[Number], Any], other: Callable[[Node], Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a node, with ``number`` of each number and ``other`` of each node in them.
    Messages and draws are told the sizes of their results, too."""
    args, kwargs = node.args, node.kwargs
    if is_item(node):
        return (other(node.args[0]), node.args[1]), {}  # type: ignore[arg-type]
    if node.target in _TOLD:
        at = 2 if node.target is DRAWN else 1
        args = (*args, *result_sizes(args[at]))  # type: ignore[arg-type]

    def filled(x: Any) -> Any:
        if isinstance(x, Node):
            return other(x)
        if type(x) is int or (type(x) is float and math.isfinite(x) and x != 0.0):
            return number(x)  # -0.0 equals 0.0, and nan not itself: these are part of the text
        if isinstance(x, list | tuple):
            return [filled(y) for y in x]
        if isinstance(x, slice):
            return slice(filled(x.start), filled(x.stop), filled(x.step))
        return x

    return tuple(map(filled, args)), {name: filled(x) for name, x in kwargs.items()}


def lies(x: torch.Tensor, number: Callable[[int], Any]) -> tuple[list, list | None, Any]:
    """(sizes, the dims from the outermost to the innermost, offset) of a tensor without gaps; of
    another, strides stand in place of the order. ``number`` of each number in them."""
    sizes, strides, offset = list(x.size()), list(x.stride()), int(x.storage_offset())
    for order in (list(range(x.dim())), sorted(range(x.dim()), key=lambda d: -strides[d])):
        if strides_of(sizes, order) == strides:
            return [number(size) for size in sizes], order, number(offset)
    where = [number(stride) for stride in strides], number(offset)
    return [number(size) for size in sizes], None, where


def strides_of(sizes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a tensor without gaps whose dims lie in that order."""
    strides: list[Any] = [1] * len(sizes)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * sizes[dim]
    return strides


def _constant(graph: GraphModule, node: Node) -> torch.Tensor:
    return getattr(graph, node.target)  # type: ignore[arg-type]


def _target(node: Node) -> Any:
    if node.op != "call_function":
        return None
    return "item" if is_item(node) else node.target


def _together(nodes: list[Node]) -> list[int]:
    """For each input and result, the first that is a part of the same memory."""
    results: Any = nodes[-1].args[0]
    ends = [*(n for n in nodes if n.op == "placeholder"), *results]
    memories = [node.meta.get("memory", node) for node in ends]
    return [memories.index(memory) for memory in memories]


def _modes() -> tuple:
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _frozen(value: Any) -> Any:
    """What can be compared and hashed. Words and numbers have their type beside them: True is 1."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(x)) for key, x in value.items())
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return (type(value), repr(value)) if isinstance(value, bool | float) else value
