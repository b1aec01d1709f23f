"""Random small programs, and the least cost of a problem by trying everything."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from consistent.cost_model.built_in import uniform_cost_model
from consistent.layout_problem.problem import Problem
from consistent.nn.planners.layout_search.options import problem_of
from consistent.nn.planners.layout_search.record import record
from consistent.spec import Placement

# A slow computer with fast links, so that small tensors are worth splitting.
DEVICE = uniform_cost_model(
    "cpu", latency=20.0, bandwidth=1 / 3, overhead=0.0, memory=0.5, python=0.0, flops=1.0
)
SIZES = (2, 3, 4, 6)
OPS = "matmul add bias relu sum layer_norm softmax transpose".split()


class RandomProgram(nn.Module):
    """``count`` ops on tensors of two dims, one after the other or on earlier results."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.lines: list[tuple] = []
        rows, columns = self.draw.choice(SIZES), self.draw.choice(SIZES)
        self.embeds = self.draw.random() < 0.4
        if self.embeds:
            self.table = nn.Parameter(torch.randn(self.draw.choice(SIZES), columns))
            self.example = torch.zeros(rows, dtype=torch.long)
            count -= 1
        else:
            self.example = torch.randn(rows, columns)
        shapes = [(rows, columns)]
        for i in range(count):
            shapes.append(self._add(i, shapes))
        del self.draw

    def _add(self, i: int, shapes: list[tuple[int, int]]) -> tuple[int, int]:
        at = self.draw.choice([len(shapes) - 1, len(shapes) - 1, self.draw.randrange(len(shapes))])
        rows, columns = shapes[at]
        op = self.draw.choice(OPS)
        twins = [j for j, shape in enumerate(shapes) if shape == (rows, columns) and j != at]
        if op == "add" and not twins:
            op = "relu"
        if op == "matmul":
            out = self.draw.choice(SIZES)
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(columns, out)))
            made = rows, out
        else:
            made = {"transpose": (columns, rows), "sum": (1, columns)}.get(op, (rows, columns))
        if op == "bias":
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(columns)))
        self.lines.append((op, at, twins[-1] if op == "add" else i))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [F.embedding(x, self.table) if self.embeds else x]
        for op, at, other in self.lines:
            values.append(self._run(op, values[at], values, other))
        return sum((value.sum() for value in values[-1:]), torch.zeros(()))

    def _run(self, op: str, x: torch.Tensor, values: list, other: int) -> torch.Tensor:
        if op in ("matmul", "bias"):
            weight = self.get_parameter(f"w{other}")
            return x @ weight if op == "matmul" else x + weight
        if op == "add":
            return x + values[other]
        if op == "sum":
            return x.sum(0, keepdim=True)
        if op == "layer_norm":
            return F.layer_norm(x, x.shape[-1:])
        return {"relu": F.relu, "softmax": lambda x: x.softmax(-1), "transpose": torch.t}[op](x)


def random_problem(seed: int, placement: Placement, count: int) -> Problem:
    """The problem of a random program of ``count`` ops; its sum in the end is one more."""
    model = RandomProgram(seed, count - 1)
    program = record(model, model, placement, (model.example,), {})
    return problem_of(program, DEVICE)


def sizes(problem: Problem) -> list[int]:
    """How many options each op has, of those that others read."""
    return [len(node.options) for node in problem.nodes if node.ins and node.outs]


def least_seconds(problem: Problem) -> float:
    """The least cost over all solutions: every choice of the ops, each with the best choice of the
    tensors that are given and of the results, which no two ops share."""
    ops = [i for i, node in enumerate(problem.nodes) if node.ins and node.outs]
    place = {node: axis for axis, node in enumerate(ops)}
    total = np.zeros(sizes(problem))

    def spread(table: np.ndarray, nodes: list[int]) -> np.ndarray:
        """``table`` with one dim for each op; ``nodes`` are those of its dims."""
        order = sorted(range(len(nodes)), key=lambda d: place[nodes[d]])
        shape = [1] * len(ops)
        for d in order:
            shape[place[nodes[d]]] = table.shape[d]
        return table.transpose(order).reshape(shape)

    for i, node in enumerate(problem.nodes):
        costs = np.array([option.seconds for option in node.options])
        if i in place:
            total = total + spread(costs, [i])
            continue
        around = costs.reshape(-1, *[1] * len(ops))
        for edge, (seconds, _) in zip(problem.edges, problem.tables, strict=True):
            if i == edge.maker and edge.reader in place:
                rows = [spread(row, [edge.reader]) for row in seconds]
            elif i == edge.reader and edge.maker in place:
                rows = [spread(row, [edge.maker]) for row in seconds.T]
            else:
                continue
            around = around + np.stack(rows)
        total = total + around.min(0)
    for edge, (seconds, _) in zip(problem.edges, problem.tables, strict=True):
        if edge.maker in place and edge.reader in place:
            total = total + spread(seconds, [edge.maker, edge.reader])
    return float(total.min())


def least_within(problem: Problem, memory: int) -> float | None:
    """The least cost of the solutions that hold no more than ``memory``, by trying each."""
    counts = [range(len(node.options)) for node in problem.nodes]
    costs = (problem.cost(solution) for solution in itertools.product(*counts))
    return min((seconds for seconds, nbytes in costs if nbytes <= memory), default=None)
