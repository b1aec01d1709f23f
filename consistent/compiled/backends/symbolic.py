"""Compiled code that serves several graphs of one form (ops that differ only in numbers).

Numbers that differ between the graphs become inputs of the code, and the integers among them become
torch symbols.

```
view(%1, [12, 16])                          view(%1, [s0, 16])        s0: 12, 20
div(%3, 264)               -->              div(%3, s1)               s1: 264, 440
for 12 rows, and for 20                     guards of torch           s1 == 22*s0, 2 <= s0
```

Integers that were equal to each other in all graphs so far share one symbol. While torch compiles
the ops, it notes its assumptions on the symbols as guards. The code may run for other numbers if
all guards hold for them, and if numbers that share a symbol are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..parts import module_of
from .form import Form, Number, memory_layout, strides_of, substitute_args
from .graph_cache import compile_without_cache
from .unalias_outputs import CompiledCallable, unalias_outputs

_aten = torch.ops.aten
# Ops whose number may be passed as a tensor instead: either is rounded to the result's dtype.
_OPS_WITH_NUMBER_OPERAND = frozenset(
    getattr(_aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
)
_EXACT_DTYPES = (torch.float32, torch.float64)


class NotSymbolic(Exception):
    """Error: these graphs cannot share code, because a number that differs must be a constant."""


class Symbolic:
    """Compiled code for graphs that differ only in numbers, and the conditions on the numbers.

    Args:
        graph, inputs, form: the graph to compile, example inputs, and their form.
        known_numbers: numbers of other graphs of this form, which show what varies.

    Raises:
        NotSymbolic: a number that differs cannot be an input.
    """

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[torch.Tensor],
        form: Form,
        known_numbers: Sequence[tuple[Number, ...]],
    ) -> None:
        self._fixed_numbers: list[tuple[int, Number]] = []
        indices_by_column: dict[tuple, list[int]] = {}
        self._floats: list[int] = []
        for i, column in enumerate(zip(*known_numbers, form.numbers, strict=True)):
            if len(set(column)) == 1:
                self._fixed_numbers.append((i, column[0]))
            elif type(column[0]) is int:
                indices_by_column.setdefault(column, []).append(i)
            else:
                self._floats.append(i)
        self._ints = list(indices_by_column.values())
        # Torch assumes that a symbol is neither 0 nor 1.
        if any(number < 2 for number in self._symbol_values(form.numbers)):
            raise NotSymbolic
        # With duck shaping, torch would give equal sizes one symbol; ``self._ints`` decides that
        # here.
        self._shapes = ShapeEnv(duck_shape=False)
        symbols = [
            _make_symbol(self._shapes, i, n)
            for i, n in enumerate(self._symbol_values(form.numbers))
        ]
        lifted = _LiftedGraph(form, self._ints, symbols, self._floats)
        self._run = unalias_outputs(graph, lifted.compile(graph, inputs, self._shapes))
        self._dtypes = lifted.dtypes
        self._guards = self._shapes.produce_guards_expression(symbols, ignore_static=False)

    def _symbol_values(self, numbers: tuple[Number, ...]) -> list[Any]:
        """Return the value of each symbol of the code, for a graph with these ``numbers``."""
        return [numbers[indices[0]] for indices in self._ints]

    def serves(self, numbers: tuple[Number, ...]) -> bool:
        """Return whether this compiled code is correct for a graph of this form with ``numbers``.

        A number that was compiled in as a constant must have the same value in ``numbers``. For the
        numbers that are symbols in the code, torch's guards must hold.
        """
        if any(numbers[i] != number for i, number in self._fixed_numbers):
            return False
        if any(numbers[i] != numbers[indices[0]] for indices in self._ints for i in indices):
            return False
        symbol_values = self._symbol_values(numbers)
        if any(number < 2 for number in symbol_values):  # torch takes symbols to be neither 0 nor 1
            return False
        guards = self._guards
        return guards is None or bool(
            self._shapes.evaluate_guards_expression(guards, symbol_values)
        )

    def bind_form(self, form: Form) -> CompiledCallable:
        """Return the code as a callable of a graph's inputs; ``form`` is the form of that graph.

        The numbers of ``form`` are filled in, so ``serves(form.numbers)`` must hold.
        """
        run = self._run
        floats = [torch.tensor(form.numbers[i], dtype=self._dtypes[i]) for i in self._floats]
        bound_inputs = (*self._symbol_values(form.numbers), *floats, *form.constants)

        def run_bound(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
            return run(*bound_inputs, *inputs)

        return run_bound


def _make_symbol(shapes: ShapeEnv, i: int, value: int) -> torch.SymInt:
    # ``evaluate_guards_expression`` binds its i-th argument to the name t<i>.
    source = LocalSource(f"t{i}")
    symbol = shapes.create_symbol(value, source, DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=value, source=source)  # type: ignore[return-value]


class _LiftedGraph:
    """Copy of a graph in which the numbers that vary are inputs.

    The inputs are, in order: symbols, varying floats, the graph's constants, and the inputs of the
    original graph.

    Args:
        form: form of the graph.
        ints: for each of ``symbols``, the indices in ``form.numbers`` that it replaces.
        symbols: torch symbols for the integers that vary.
        floats: indices in ``form.numbers`` of the floats that vary.
    """

    def __init__(
        self, form: Form, ints: list[list[int]], symbols: list[torch.SymInt], floats: list[int]
    ) -> None:
        self._form, self._floats = form, floats
        self._graph = Graph()
        self._number_counter = count()
        self._symbols: dict[int, torch.SymInt] = {}
        self._inputs: dict[int, Node] = {}
        self._symbol_inputs: list[Any] = list(symbols)
        self.dtypes: dict[int, torch.dtype] = {}
        for symbol, places in zip(symbols, ints, strict=True):
            node = self._graph.placeholder(f"symbol_{places[0]}")
            self._symbols.update(dict.fromkeys(places, symbol))
            self._inputs.update(dict.fromkeys(places, node))
        for i in floats:
            self._inputs[i] = self._graph.placeholder(f"number_{i}")

    def compile(
        self, graph: GraphModule, inputs: Sequence[torch.Tensor], shapes: ShapeEnv
    ) -> CompiledCallable:
        """Compile the copy of ``graph``, and return the code.

        Kernels are cached on disk, but torch's caches of whole graphs are switched off, because
        they do not keep all of the assumptions on symbols.
        """
        mode = FakeTensorMode(shape_env=shapes)
        with mode:
            fakes = [self._fake(x) for x in (*self._form.constants, *inputs)]
        nodes = list(graph.graph.nodes)
        copies: dict[Node, Node] = {}
        for op in ("get_attr", "placeholder"):
            for node in nodes:
                if node.op == op:
                    copies[node] = self._graph.placeholder(f"{op}_{len(copies)}")
        for node in nodes:
            args, kwargs = substitute_args(node, self._number_replacer(node), copies.__getitem__)
            if node.op == "call_function":
                copies[node] = self._graph.call_function(node.target, args, kwargs)
            elif node.op == "output":
                self._graph.output(tuple(args[0]))
        with mode:
            numbers = [torch.empty((), dtype=self.dtypes[i]) for i in self._floats]
        module = module_of(torch.nn.Module(), self._graph)
        with tracing(TracingContext(mode)):
            return compile_without_cache(module, [*self._symbol_inputs, *numbers, *fakes])

    def _fake(self, x: torch.Tensor) -> torch.Tensor:
        sizes, order, where = memory_layout(x, self._symbol_or_number)
        if order is not None:
            strides, offset = strides_of(sizes, order), where
        else:
            strides, offset = where
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
        # A tensor with an offset or gaps is made as a view of a larger tensor.
        last_index = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        whole = torch.empty(offset + last_index + 1, dtype=x.dtype, device=x.device)
        return whole.as_strided(sizes, strides, offset)

    def _symbol_or_number(self, number: Number) -> Any:
        return self._symbols.get(next(self._number_counter), number)

    def _number_replacer(self, node: Node) -> Any:
        def input_of(number: Number) -> Any:
            i = next(self._number_counter)
            if i in self._inputs and type(number) is float:
                self.dtypes[i] = _dtype_of(node, number)
            return self._inputs.get(i, number)

        return input_of


def _dtype_of(node: Node, number: float) -> torch.dtype:
    """Return the dtype of a 0-dim tensor that may be passed to ``node`` in place of ``number``.

    Raises:
        NotSymbolic: no tensor may replace it.
    """
    dtype: Any = node.meta.get("dtype")
    is_replaceable = (
        node.target in _OPS_WITH_NUMBER_OPERAND and not node.kwargs and dtype in _EXACT_DTYPES
    )
    if not is_replaceable or node.args[1] is not number:
        raise NotSymbolic
    return dtype
