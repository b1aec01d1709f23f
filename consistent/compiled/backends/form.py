"""Form of a graph: its ops with all numbers replaced by blanks, to find graphs that may share
compiled code.

Recordings of one step at different sizes mostly have the same ops in the same order, and differ
only in numbers.

```
%2 = view(%1, [12, 16])                    view(%1, [_, _])            12, 16
%3 = message([%2], 4781...)        -->     message([%2], _, [_, _])    4781..., 24, 16
%4 = div(%3, 264)                          div(%3, _)                  264
     graph                                 text                        numbers
```

The text also contains what compiled code depends on besides the ops: dtype, device, number of dims
and stride order of each input, which values share memory, and torch's modes.
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
_OPS_WITH_RESULT_SIZES = (MESSAGE, WAIT_MESSAGE, DRAWN)


class Form(NamedTuple):
    """The ops of a graph as comparable text, separated from the numbers that they use.

    For example, graphs of equal ``text`` are recordings of a step at several batch sizes.

    Args:
        text: description of the ops without numbers, which is equal for graphs that may share code.
        numbers: the numbers of the graph and its inputs' sizes and strides, in the order in which
            ``memory_layout`` and ``substitute_args`` visit them.
        constants: tensors that are stored in the graph itself.
    """

    text: Hashable
    numbers: tuple[Number, ...]
    constants: list[torch.Tensor]


def form_of(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Form | None:
    """Return the form of a graph for these inputs.

    Return None if inputs share memory into which an op writes: the result may then depend on how
    they overlap, which a form does not describe.
    """
    nodes = list(graph.graph.nodes)
    written_memories = {memory for node in nodes for memory in node.meta.get("written", ())}
    memories = [storage_of(x) for x in inputs]
    recorded_memories = (node.meta.get("memory") for node in nodes if node.op == "placeholder")
    for recorded, memory in zip(recorded_memories, memories, strict=True):
        if recorded in written_memories and memories.count(memory) > 1:
            return None
    numbers: list[Number] = []
    places = {node: i for i, node in enumerate(nodes)}

    def note_number(number: Any) -> type:
        numbers.append(number)
        return type(number)

    constants = [_attribute_tensor(graph, node) for node in nodes if node.op == "get_attr"]
    text: list[Any] = [_torch_modes()]
    text += [(x.dtype, x.device, memory_layout(x, note_number)) for x in (*constants, *inputs)]
    text.append([memories.index(memory) for memory in memories])
    for node in nodes:
        args, kwargs = substitute_args(node, note_number, places.__getitem__)
        text.append((node.op, _target(node), args, kwargs))
    text.append(_memory_sharing(nodes))
    return Form(_to_hashable(text), tuple(numbers), constants)


def substitute_args(
    node: Node, replace_number: Callable[[Number], Any], replace_node: Callable[[Node], Any]
) -> tuple[tuple, dict[str, Any]]:
    """Return (args, kwargs) of ``node`` with its numbers and its input nodes replaced.

    ``form_of`` uses it to replace numbers by blanks, ``symbolic.py`` to replace them by symbols.
    For messages and random ops, the sizes of the results are appended as arguments.

    Args:
        replace_number: called with each number; its result takes the number's place.
        replace_node: called with each input node; its result takes the node's place.
    """
    args, kwargs = node.args, node.kwargs
    if is_item(node):
        # The index of an item stays in the text: it selects a result, and is no size.
        return (replace_node(node.args[0]), node.args[1]), {}  # type: ignore[arg-type]
    if node.target in _OPS_WITH_RESULT_SIZES:
        number_index = 2 if node.target is DRAWN else 1
        args = (*args, *result_sizes(args[number_index]))  # type: ignore[arg-type]

    def replace_numbers(x: Any) -> Any:
        if isinstance(x, Node):
            return replace_node(x)
        # Floats that are zero, infinite or nan stay in the text, by their repr. They cannot be
        # compared as numbers: -0.0 == 0.0, and nan != nan.
        if type(x) is int or (type(x) is float and math.isfinite(x) and x != 0.0):
            return replace_number(x)
        if isinstance(x, list | tuple):
            return [replace_numbers(y) for y in x]
        if isinstance(x, slice):
            return slice(replace_numbers(x.start), replace_numbers(x.stop), replace_numbers(x.step))
        return x

    return tuple(map(replace_numbers, args)), {
        name: replace_numbers(x) for name, x in kwargs.items()
    }


def memory_layout(x: torch.Tensor, number: Callable[[int], Any]) -> tuple[list, list | None, Any]:
    """Return how ``x`` is arranged in memory, with each number n replaced by ``number(n)``.

    For a tensor without gaps, this is (sizes, dims from outermost to innermost, offset); for other
    tensors (sizes, None, (strides, offset)). Example: the transpose of a contiguous [2, 3] tensor
    gives ([3, 2], [1, 0], 0).
    """
    sizes, strides, offset = list(x.size()), list(x.stride()), int(x.storage_offset())
    for order in (list(range(x.dim())), sorted(range(x.dim()), key=lambda d: -strides[d])):
        if strides_of(sizes, order) == strides:
            return [number(size) for size in sizes], order, number(offset)
    strides_and_offset = [number(stride) for stride in strides], number(offset)
    return [number(size) for size in sizes], None, strides_and_offset


def strides_of(sizes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return the strides of a tensor without gaps; ``order`` lists its dims, outermost first.

    Example: ``strides_of([3, 2], [1, 0])`` gives [1, 3].
    """
    strides: list[Any] = [1] * len(sizes)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * sizes[dim]
    return strides


def _attribute_tensor(graph: GraphModule, node: Node) -> torch.Tensor:
    return getattr(graph, node.target)  # type: ignore[arg-type]


def _target(node: Node) -> Any:
    if node.op != "call_function":
        return None
    return "item" if is_item(node) else node.target


def _memory_sharing(nodes: list[Node]) -> list[int]:
    """Return which inputs and results share memory: for each, the index of the first that does.

    Inputs come first, then results. [0, 1, 0] means that the third has the memory of the first.
    """
    results: Any = nodes[-1].args[0]
    inputs_and_results = [*(n for n in nodes if n.op == "placeholder"), *results]
    memories = [node.meta.get("memory", node) for node in inputs_and_results]
    return [memories.index(memory) for memory in memories]


def _torch_modes() -> tuple:
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _to_hashable(value: Any) -> Any:
    """Return ``value`` in a hashable form, as part of a form's text.

    Bools and floats get their type added, since True == 1 and 2.0 == 2.
    """
    if isinstance(value, list | tuple):
        return tuple(map(_to_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _to_hashable(x)) for key, x in value.items())
    if isinstance(value, slice):
        return "slice", _to_hashable((value.start, value.stop, value.step))
    return (type(value), repr(value)) if isinstance(value, bool | float) else value
