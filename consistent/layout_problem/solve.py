"""Solver of a layout problem: it is written as an integer program, which HiGHS (in scipy) solves.

```
x[node, option] in {0, 1}       one option for each node
y[edge, have, want] in [0, 1]   sums to x of the maker's options that give `have`,
                                and to x of the reader's that want `want`
least  sum seconds * x + sum seconds * y      with  sum bytes * x + sum bytes * y <= memory
```

``x`` selects the options of nodes, ``y`` the boxing on edges. Where ``x`` is an integer, ``y`` is
too. Nodes of equal blocks share their ``x``. Variables have the order of the program, and at equal
cost the earlier option is taken, so that every rank gets the same solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..spec import NdSbp
from .problem import Edge, Problem

_MICRO = 1e6
# Microseconds that each option costs more than the one before it, to break ties: a picosecond.
_TIE_BREAK = 1e-6


class DoesNotFitInMemory(ValueError):
    """Raised by ``solve`` if every solution holds more bytes than allowed.

    Attributes:
        min_bytes: the bytes of the solution that holds the fewest.
        memory: the bytes allowed.
        solution: the solution that holds the fewest.
    """

    def __init__(self, min_bytes: int, memory: int, solution: Sequence[int]) -> None:
        super().__init__(f"{min_bytes:,} bytes are held at least, and {memory:,} are allowed")
        self.min_bytes, self.memory, self.solution = min_bytes, memory, list(solution)


def solve(problem: Problem, memory: int | None = None) -> list[int]:
    """Return the index of the chosen option for each node, so that the step takes the least time.

    Args:
        problem: the layout problem.
        memory: the most bytes that a rank may hold; None for no limit.

    Raises:
        ImportError: scipy is not installed.
        DoesNotFitInMemory: no solution fits in ``memory``.
    """
    program = _IntegerProgram(problem)
    solution = program.best(program.seconds, memory)
    if solution is None:
        assert memory is not None
        smallest = program.best(program.nbytes, None)
        assert smallest is not None
        raise DoesNotFitInMemory(problem.cost(smallest)[1], memory, smallest)
    return solution


class _IntegerProgram:
    """Integer program of a layout problem: variables, costs, and linear constraints.

    The top of this file has its formulas. Costs are ``seconds`` (in microseconds) and ``nbytes``,
    by variable.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.seconds: list[float] = []
        self.nbytes: list[float] = []
        self._rows: list[dict[int, float]] = []
        self._sums: list[float] = []
        self._first_variables = self._add_option_variables()
        self._choice_count = len(self.seconds)
        self._add_boxing_variables()

    def _add_variable(self, seconds: float, nbytes: float) -> int:
        """Add a variable with these costs, and return its index."""
        self.seconds.append(seconds * _MICRO)
        self.nbytes.append(nbytes)
        return len(self.seconds) - 1

    def _add_option_variables(self) -> list[int]:
        """Create the ``x`` variables, one per option; return the index of each node's first one.

        Nodes that must take the same option (``Node.block_key``) get the same variables.
        """
        first_by_key: dict[Any, int] = {}
        firsts = []
        for index, node in enumerate(self.problem.nodes):
            key = (
                index
                if node.block_key is None
                else (node.block_key, tuple(map(repr, node.options)))
            )
            if key not in first_by_key:
                first_by_key[key] = len(self.seconds)
                for i in range(len(node.options)):
                    self.seconds.append(_TIE_BREAK * i)
                    self.nbytes.append(0.0)
                self._rows.append({first_by_key[key] + i: 1.0 for i in range(len(node.options))})
                self._sums.append(1.0)
            first = first_by_key[key]
            for i, option in enumerate(node.options):
                self.seconds[first + i] += option.seconds * _MICRO
                self.nbytes[first + i] += option.nbytes
            firsts.append(first)
        return firsts

    def _add_boxing_variables(self) -> None:
        """Create the ``y`` variables, which select the boxing on edges.

        Edges that connect the same ``x`` variables at equal cost share their ``y`` variables, whose
        costs are multiplied by the number of these edges.
        """
        counts: dict[tuple, list[Any]] = {}
        for edge in self.problem.edges:
            key = (
                self._first_variables[edge.maker],
                edge.output,
                self._first_variables[edge.reader],
                edge.operand,
            )
            counts.setdefault((*key, edge.spec, edge.tracked, edge.gathered), [edge, 0])[1] += 1
        for edge, count in counts.values():
            self._add_edge_variables(edge, count)

    def _add_edge_variables(self, edge: Edge, count: int) -> None:
        """Create the ``y`` variables of ``edge``, which stands for ``count`` edges."""
        have = _variables_by_layout(
            self.problem.source_layouts(edge), self._first_variables[edge.maker]
        )
        want = _variables_by_layout(
            self.problem.target_layouts(edge), self._first_variables[edge.reader]
        )
        costs = {
            (a, b): tuple(count * c for c in self.problem.boxing(edge, a, b))
            for a in have
            for b in want
        }
        # With one layout on a side, x alone decides the boxing, and no y is needed.
        if len(have) == 1 or len(want) == 1:
            for (a, b), (seconds, nbytes) in costs.items():
                for x in want[b] if len(have) == 1 else have[a]:
                    self.seconds[x] += seconds * _MICRO
                    self.nbytes[x] += nbytes
            return
        y = {pair: self._add_variable(*cost) for pair, cost in costs.items()}
        for a, xs in have.items():
            self._constrain_equal_sums([y[a, b] for b in want], xs)
        for b, xs in want.items():
            self._constrain_equal_sums([y[a, b] for a in have], xs)

    def _constrain_equal_sums(self, ys: Sequence[int], xs: Sequence[int]) -> None:
        """Add the constraint that the variables ``ys`` and the variables ``xs`` have equal sums."""
        self._rows.append({**dict.fromkeys(ys, 1.0), **dict.fromkeys(xs, -1.0)})
        self._sums.append(0.0)

    def best(self, costs: Sequence[float], memory: int | None) -> list[int] | None:
        """Return the solution with the least sum of ``costs``; None if none fits in ``memory``.

        ``costs`` are ``self.seconds`` or ``self.nbytes``. ``memory`` is in bytes; None for no
        limit.
        """
        optimize, sparse = _import_scipy()
        cells = [(r, c, v) for r, row in enumerate(self._rows) for c, v in row.items()]
        rows, columns, values = zip(*cells, strict=True)
        shape = len(self._rows), len(costs)
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        constraints = [optimize.LinearConstraint(matrix, self._sums, self._sums)]
        if memory is not None:
            memory_row = sparse.csr_array(np.array([self.nbytes]) / max(memory, 1))
            constraints.append(optimize.LinearConstraint(memory_row, -np.inf, 1.0))
        integrality = np.zeros(len(costs))
        integrality[: self._choice_count] = 1
        # Bytes are scaled so that costs are near one, as microseconds already are.
        scale = max(costs) or 1.0
        result = optimize.milp(
            np.array(costs) / (scale if costs is self.nbytes else 1.0),
            integrality=integrality,
            bounds=optimize.Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 1e-9},
        )
        if result.x is None:
            if result.status == 2:  # infeasible
                return None
            raise RuntimeError(f"layouts: HiGHS, which chooses them, stopped: {result.message}")
        return [
            int(np.argmax(result.x[first : first + len(node.options)]))
            for first, node in zip(self._first_variables, self.problem.nodes, strict=True)
        ]


def _variables_by_layout(layouts: Sequence[NdSbp], first: int) -> dict[NdSbp, list[int]]:
    """Return {layout: indices of the variables of the options that have it}.

    ``layouts`` has the layout of each option of a node, and ``first`` is the index of the variable
    of the first option.
    """
    variables: dict[NdSbp, list[int]] = {}
    for i, sbp in enumerate(layouts):
        variables.setdefault(sbp, []).append(first + i)
    return variables


def _import_scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise ImportError(
            "layouts: they are chosen by scipy's HiGHS, and scipy is not installed: "
            "pip install scipy, or pip install torch-consistent[auto]. Plans by name need none: "
            "parallelize(model, placement, 'zero3')."
        ) from None
    return optimize, sparse
