"""Random programs that plain torch runs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st

from tests.consistent.tensor.programs import Leaf, Program, execute, run_plain, values

# Grids of ranks for a world of 2, 3 or 4; some leave a rank out, some turn the order round.
GRIDS: dict[int, list] = {
    2: [[0, 1], [1, 0]],
    3: [[0, 1, 2], [2, 0, 1], [1, 2], [[0], [1], [2]]],
    4: [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [0, 1, 2, 3], [[1, 3, 0]]],
}


class _Drawing:
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

    def dim(self, name: str) -> int:
        n = self.names[name].ndim
        assume(n)
        return self.draw(st.integers(-n, n - 1))

    def add(self, expression: str, target: str | None = None) -> None:
        """Append ``v7 = expression``; a program that plain torch refuses is dropped."""
        line = expression if target == "" else f"v{self.next} = {expression}"
        try:
            exec(line, {"torch": torch, "F": F}, self.names)  # noqa: S102
        except (RuntimeError, IndexError, ValueError, TypeError):
            assume(False)
        self.next += target != ""
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


def _unary(d: _Drawing) -> None:
    name = d.draw(st.sampled_from("sin tanh sigmoid neg relu abs exp square".split()))
    d.add(f"torch.{name}({d.pick()})")


def _scalar(d: _Drawing) -> None:
    d.add(
        d.draw(
            st.sampled_from(["{} * 3", "2.5 - {}", "{} / 4", "{} ** 2", "1 + {}", "-{}"])
        ).format(d.pick())
    )


def _binary(d: _Drawing) -> None:
    x = d.pick()
    shape = d.names[x].shape

    def broadcasts(y: torch.Tensor) -> bool:
        pairs = zip(shape[::-1], y.shape[::-1])
        return all(a == b or 1 in (a, b) for a, b in pairs)

    y = d.pick(broadcasts)
    d.add(
        d.draw(
            st.sampled_from(
                ["{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "{} / ({}.abs() + 1)"]
            )
        ).format(x, y)
    )


def _plain_operand(d: _Drawing) -> None:
    x = d.pick()
    d.add(f"{x} * torch.linspace(0.5, 1.5, {x}.numel(), dtype={x}.dtype).view({x}.shape)")


def _mask(d: _Drawing) -> None:
    x = d.pick()
    d.add(
        d.draw(
            st.sampled_from(
                ["torch.where({0} > 0, {0}, {0} * 0.5)", "{0}.masked_fill({0} < 0, 0.25)"]
            )
        ).format(x)
    )


def _matmul(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    rows = d.names[x].shape[-1]
    y = d.pick(lambda v: v.ndim in (1, 2) and v.shape[0] == rows)
    d.add(d.draw(st.sampled_from(["{} @ {}", "torch.matmul({}, {})"])).format(x, y))


def _linear(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    inner = d.names[x].shape[-1]
    w = d.pick(lambda v: v.ndim == 2 and v.shape[1] == inner)
    d.add(f"F.linear({x}, {w})")


def _reduce(d: _Drawing) -> None:
    x = d.pick()
    keep = d.draw(st.booleans())
    name = d.draw(st.sampled_from("sum mean sum logsumexp prod var amax".split()))
    assume(d.names[x].numel() or name == "sum")
    if name in ("sum", "mean") and d.draw(st.booleans()):
        d.add(f"{x}.{name}()")
    else:
        extra = ", correction=0" if name == "var" else ""
        d.add(f"{x}.{name}(dim={d.dim(x)}, keepdim={keep}{extra})")


_ALONG = ["torch.softmax", "F.log_softmax", "torch.cumsum"]


def _softmax(d: _Drawing) -> None:
    x = d.pick()
    d.add(f"{d.draw(st.sampled_from(_ALONG))}({x}, {d.dim(x)})")


def _layer_norm(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1 and v.shape[-1] > 1)
    d.add(f"F.layer_norm({x}, ({d.names[x].shape[-1]},), eps=0.1)")


def _transpose(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    d.add(
        d.draw(
            st.sampled_from(
                [
                    f"{x}.transpose({d.dim(x)}, {d.dim(x)})",
                    f"{x}.movedim({d.dim(x)}, 0)",
                    f"{x}.unsqueeze({d.dim(x)})",
                ]
            )
        )
    )


def _view(d: _Drawing) -> None:
    x = d.pick()
    shape = list(d.names[x].shape)
    choices = ["-1"] if shape and d.names[x].numel() else []
    choices += [f"{shape[0] * shape[1]}, *{shape[2:]}"] if len(shape) > 1 else []
    choices += [
        f"{n // f}, {f}, *{shape[1:]}" for n in shape[:1] for f in (2, 3) if n and n % f == 0
    ]
    choices += [", ".join(map(str, [1, *shape]))]
    d.add(f"{x}.reshape({d.draw(st.sampled_from(choices))})")


def _index(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1 and v.shape[0] > 0)
    n = d.names[x].shape[0]
    k = d.draw(st.integers(-n, n - 1))
    kinds = [
        f"{k}",
        f"{k}:",
        f":{k}",
        "::2",
        f"..., {k % max(1, d.names[x].shape[-1])}:",
        f"[{k}, 0]",
        "None",
        f"torch.tensor([{k}, 0, {n - 1}])",
    ]
    d.add(f"{x}[{d.draw(st.sampled_from(kinds))}]")


def _cat(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    y = d.pick(lambda v: v.shape == d.names[x].shape)
    d.add(f"{d.draw(st.sampled_from(['torch.cat', 'torch.stack']))}([{x}, {y}, {x}], {d.dim(x)})")


def _chunk(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim >= 1 and v.shape[0] > 1)
    d.add(f"torch.add(*{x}.split([1, 1, {d.names[x].shape[0] - 2}])[:2])")


def _expand(d: _Drawing) -> None:
    x = d.pick(lambda v: v.ndim < 3)
    d.add(f"{x}.expand(2, {', '.join(['-1'] * d.names[x].ndim)})")


def _in_place(d: _Drawing) -> None:
    x = d.pick(lambda v: v.grad_fn is not None)
    kinds = [
        "{0}.mul_(2.0)",
        "{0}.add_(1.0)",
        "{0}.sub_(torch.ones({1}, dtype=torch.float64))",
        "{0}.clamp_(min=-0.5)",
        "{0}.neg_()",
    ]
    if d.names[x].ndim and d.names[x].shape[0]:
        kinds += ["{0}[0] = 0.5", "{0}[-1:] *= 2"]
    d.add(d.draw(st.sampled_from(kinds)).format(x, tuple(d.names[x].shape)), "")


_OPS = [
    _unary, _scalar, _binary, _plain_operand, _mask, _matmul, _linear, _reduce, _softmax,
    _layer_norm, _transpose, _view, _index, _cat, _chunk, _expand, _in_place,
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, world: int) -> Program:
    """Programs of 3 to 8 lines for ``world`` ranks that plain torch runs, forward and backward."""
    drawing = _Drawing(draw, world)
    for _ in range(draw(st.integers(3, 8))):
        draw(st.sampled_from(_OPS))(drawing)
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
