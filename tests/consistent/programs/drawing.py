"""Random programs that plain torch runs, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st

from tests.consistent.programs.drawn_ops import OPS
from tests.consistent.programs.programs import Leaf, Program, execute, run_plain, values

# Grids of ranks for a world of 2, 3 or 4; some leave a rank out, some turn the order round.
GRIDS: dict[int, list] = {
    2: [[0, 1], [1, 0]],
    3: [[0, 1, 2], [2, 0, 1], [1, 2], [[0], [1], [2]]],
    4: [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [0, 1, 2, 3], [[1, 3, 0]]],
}


class Drawing:
    """A program as it grows; ``names`` holds plain values, whose shapes the next line reads."""

    def __init__(self, draw: st.DrawFn, world: int):
        self.draw = draw
        ranks = draw(st.sampled_from(GRIDS[world]))
        axes = 2 if isinstance(ranks[0], list) else 1
        count = draw(st.integers(1, 3))
        leaves, shapes = [], [draw(_shapes())]
        for _ in range(count):
            # Shapes that repeat let operands meet; single dims broadcast.
            shape = draw(
                st.one_of(st.sampled_from(shapes), _shapes(), st.sampled_from(_kin(shapes[0])))
            )
            shapes.append(shape)
            entries = [
                draw(st.sampled_from(["B", "P", *(f"S({d})" for d in range(len(shape)))]))
                for _ in range(axes)
            ]
            leaves.append(Leaf(shape, entries[0] if axes == 1 else f"({', '.join(entries)})"))
        self.program = Program(ranks, tuple(leaves), (), "v0")
        self.names = execute(self.program, [x.requires_grad_() for x in values(self.program)])
        self.next = len(leaves)

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda x: True) -> str:
        """A name of a floating tensor; later ones are likelier."""
        names = [n for n, v in self.names.items() if isinstance(v, torch.Tensor) and fits(v)]
        assume(names)
        return self.draw(st.sampled_from([*names, *names[-2:]]))

    def plain(self, shape: Sequence[int]) -> str:
        """Code of a plain tensor."""
        n = math.prod(shape)
        return f"torch.linspace(-0.9, 1.3, {n}, dtype=torch.float64).view({tuple(shape)})"

    def dim(self, name: str) -> int:
        n = self.names[name].ndim
        assume(n)
        return self.draw(st.integers(-n, n - 1))

    def among(self, *forms: str) -> str:
        """One of ``forms``."""
        return self.draw(st.sampled_from(forms))

    def write(self, statement: str) -> None:
        """Append a line that makes no name."""
        self._run(statement)

    def add(self, expression: str, outputs: int = 1) -> None:
        """Append ``v7 = expression``, or ``v7, v8 = ...``."""
        targets = ", ".join(f"v{self.next + i}" for i in range(outputs))
        self._run(f"{targets} = {expression}")
        self.next += outputs

    def _run(self, line: str) -> None:
        """A program that plain torch refuses is dropped."""
        try:
            exec(line, {"torch": torch, "F": F}, self.names)  # noqa: S102
            for value in self.names.values():
                _ = value.grad_fn  # torch refuses it of some views of what was written into
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            assume(False)
        self.program = Program(
            self.program.ranks, self.program.leaves, (*self.program.lines, line), "v0"
        )


def _shapes() -> st.SearchStrategy[tuple[int, ...]]:
    size = st.one_of(st.integers(1, 5), st.integers(0, 6))
    return st.lists(size, min_size=0, max_size=3).map(tuple)


def _kin(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that broadcast or multiply with ``shape``."""
    if not shape:
        return [()]
    return [
        shape,
        shape[1:],
        shape[::-1],
        (1, *shape[1:]),
        (*shape[:-1], 1),
        (4, shape[-1]),
        (shape[-1], 3),
    ]


@st.composite
def programs(draw: st.DrawFn, world: int) -> Program:
    """Programs of 3 to 10 lines for ``world`` ranks that plain torch runs, forward and backward."""
    drawing = Drawing(draw, world)
    for _ in range(draw(st.integers(3, 10))):
        draw(st.sampled_from(OPS))(drawing)
    made = drawing.program
    program = Program(
        made.ranks, made.leaves, made.lines, drawing.pick(lambda v: v.grad_fn is not None)
    )
    try:
        names, _ = run_plain(program)
    except RuntimeError:  # an in-place op wrote what backward needs
        assume(False)
    assume(all(bool(v.isfinite().all()) for v in names.values()))
    return program
