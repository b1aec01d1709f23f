"""Draws docs/pictures/: `python docs/make_drawings.py`. Each picture is plain SVG."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "pictures"
INK, PALE, LINE = "#1f2933", "#f2f4f7", "#9aa5b1"
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # a colour for each rank
FONT = "font-family='system-ui, sans-serif'"


def box(x: float, y: float, w: float, h: float, fill: str = "none", line: str = LINE) -> str:
    return (
        f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='3' fill='{fill}' "
        f"stroke='{line}'/>"
    )


def text(
    x: float, y: float, words: str, size: int = 14, fill: str = INK, at: str = "middle"
) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{at}' fill='{fill}' {FONT}>"
        f"{escape(words)}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    start = " marker-start='url(#tip)'" if both else ""
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{INK}' stroke-width='1.5' "
        f"marker-end='url(#tip)'{start}/>"
    )


def picture(width: int, height: int, parts: list[str]) -> str:
    """A card on white, so that it is legible on a dark page too."""
    tip = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto-start-reverse'><path d='M0 0 L8 4 L0 8 z' fill='{INK}'/>"
        "</marker></defs>"
    )
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}'>"
    )
    card = f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>"
    return "\n".join([head, tip, card, *parts, "</svg>"]) + "\n"


def cells(
    x: float, y: float, side: float, rows: int, cols: int, held: Callable[[int, int], str | None]
) -> list[str]:
    """A matrix; ``held(row, col)`` is the colour of a cell that is there, None of one that is
    not."""
    made = []
    for r in range(rows):
        for c in range(cols):
            fill = held(r, c)
            made.append(box(x + c * side, y + r * side, side, side, fill or PALE, "#ffffff"))
    return made


def placement() -> str:
    """Two placements over six ranks: a row of two, and a grid of two by two with named axes."""
    parts = [text(90, 30, 'placement("cpu", [0, 1])', 13)]
    for rank in range(2):
        parts += [box(30 + 62 * rank, 75, 56, 44, RANKS[rank])]
        parts += [text(58 + 62 * rank, 102, f"rank {rank}", 13, "#ffffff")]
    parts += [arrow(30, 145, 150, 145), text(90, 165, "one axis", 12)]
    parts += [text(430, 30, 'placement("cpu", [[2, 3], [4, 5]], axes=("dp", "tp"))', 13)]
    for row in range(2):
        for col in range(2):
            x, y = 372 + 62 * col, 50 + 50 * row
            parts += [box(x, y, 56, 44, RANKS[2 * row + col])]
            parts += [text(x + 28, y + 27, f"rank {2 + 2 * row + col}", 13, "#ffffff")]
    parts += [arrow(355, 50, 355, 146), text(335, 100, "dp", 12)]
    parts += [arrow(372, 165, 494, 165), text(432, 183, "tp", 12)]
    return picture(620, 200, parts)


def sbp() -> str:
    """A matrix of four by four on two ranks, under S(0), S(1), B and P."""
    parts, side = [], 17
    kinds = {
        "S(0)": "pieces along dim 0",
        "S(1)": "pieces along dim 1",
        "B": "all of it on each",
        "P": "addends: add them up",
    }
    for k, (name, words) in enumerate(kinds.items()):
        left = 20 + k * 185
        parts += [text(left + 78, 30, name, 18), text(left + 78, 168, words, 12)]
        for rank in range(2):
            x = left + rank * 84
            parts += _holding(name, rank, x, 52, side)
            parts += [text(x + 34, 142, f"rank {rank}", 12)]
    return picture(770, 185, parts)


def _holding(name: str, rank: int, x: float, y: float, side: float) -> list[str]:
    def held(r: int, c: int) -> str | None:
        if name == "B":  # equal colours are equal values: each rank has both pieces
            return RANKS[r // 2]
        mine = {"S(0)": r // 2 == rank, "S(1)": c // 2 == rank}.get(name, True)
        return RANKS[rank] if mine else None

    made = cells(x, y, side, 4, 4, held)
    if name == "P":
        made.append(text(x + 34, y + 44, f"x{'₀' if rank == 0 else '₁'}", 22, "#ffffff"))
        if rank == 0:
            made.append(text(x + 76, y + 41, "+", 18))
    return made


def grid() -> str:
    """On a grid of two by two, one SBP for each axis."""
    parts, side = [], 12
    cases: dict[str, Callable[[int, int], Callable[[int, int], bool]]] = {
        "(S(0), B)": lambda a, b: lambda r, c: r // 2 == a,
        "(S(0), S(1))": lambda a, b: lambda r, c: r // 2 == a and c // 2 == b,
        "(S(0), S(0))": lambda a, b: lambda r, c: r == 2 * a + b,
    }
    for k, (name, where) in enumerate(cases.items()):
        left = 40 + k * 200
        parts.append(text(left + 62, 28, name, 16))
        for a in range(2):
            for b in range(2):
                inside, colour = where(a, b), RANKS[2 * a + b]
                parts += cells(
                    left + b * 72, 48 + a * 78, side, 4, 4,
                    lambda r, c, inside=inside, colour=colour: colour if inside(r, c) else None,
                )  # fmt: skip
                parts.append(text(left + b * 72 + 24, 110 + a * 78, f"rank {2 * a + b}", 11))
    return picture(640, 205, parts)


def boxing() -> str:
    """The moves between S, B and P, with what a rank sends of n bytes on k ranks."""
    at = {"S": (120, 170), "B": (510, 60), "P": (510, 280)}
    names = {"S": "S: pieces", "B": "B: whole", "P": "P: addends"}
    parts = []
    for key, (x, y) in at.items():
        parts += [box(x - 65, y - 24, 130, 48, PALE), text(x, y + 6, names[key], 16)]
    parts += [arrow(185, 150, 442, 60), text(290, 88, "all-gather: (k-1)·n/k", 12)]
    parts += [arrow(442, 78, 187, 166), text(352, 142, "slice: 0", 12)]
    parts += [arrow(442, 280, 185, 190), text(280, 262, "reduce-scatter: (k-1)·n/k", 12)]
    parts += [arrow(187, 174, 442, 262), text(352, 207, "pad with zeros: 0", 12)]
    parts += [arrow(500, 256, 500, 86), arrow(524, 84, 524, 254)]
    parts += [
        text(492, 165, "all-reduce:", 12, at="end"),
        text(492, 181, "2(k-1)·n/k", 12, at="end"),
    ]
    parts += [
        text(532, 165, "one rank", 12, at="start"),
        text(532, 181, "keeps it: 0", 12, at="start"),
    ]
    parts += [text(120, 225, "S(0) to S(1):", 12), text(120, 241, "all-to-all: (k-1)·n/k²", 12)]
    parts += [text(320, 335, "bytes that a rank sends, of a tensor of n bytes on k ranks", 12)]
    return picture(640, 350, parts)


def duals() -> str:
    """Forward and backward of y = x @ w with a split batch."""
    parts = [text(70, 60, "forward", 15), text(70, 165, "backward", 15)]
    for x, name, lies in ((220, "x", "S(0)"), (360, "w", "B"), (540, "y", "S(0)")):
        parts += [box(x - 50, 35, 100, 42, PALE), text(x, 61, f"{name}: {lies}", 15)]
    parts += [text(290, 61, "@", 16), arrow(415, 56, 482, 56)]
    for x, name, lies in ((220, "dx", "S(0)"), (360, "dw", "P"), (540, "dy", "S(0)")):
        parts += [box(x - 50, 140, 100, 42, PALE), text(x, 166, f"{name}: {lies}", 15)]
    parts += [arrow(488, 161, 418, 161)]
    for x in (220, 360, 540):
        parts += [arrow(x, 80, x, 137, both=True), text(x + 24, 113, "dual", 12)]
    parts += [text(340, 212, "dual(S) = S,  dual(B) = P,  dual(P) = B", 14)]
    parts += [text(340, 236, "each rank has an addend of dw; it is summed when it reaches w", 12)]
    return picture(640, 252, parts)


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """For each stage its actions (F or B, micro-batch, start), a forward taking one unit of time
    and a backward two."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        order = [("F", m) for m in range(ahead)]
        for m in range(micro_batches):
            order.append(("B", m))
            if m + ahead < micro_batches:
                order.append(("F", m + ahead))
        orders.append(order)
    ends: dict[tuple[str, int, int], int] = {}
    made: list[list[tuple[str, int, int]]] = [[] for _ in range(stages)]
    free = [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, m = order[0]
            before = ("F", stage - 1, m) if kind == "F" else ("B", stage + 1, m)
            own = ("F", stage, m) if kind == "B" else None
            last = before[1] < 0 or before[1] >= stages
            if (not last and before not in ends) or (own and own not in ends):
                continue
            start = max(free[stage], 0 if last else ends[before], ends[own] if own else 0)
            free[stage] = ends[kind, stage, m] = start + (1 if kind == "F" else 2)
            made[stage].append((kind, m, start))
            order.pop(0)
    return made


def stages() -> str:
    """Three stages at four micro-batches, one forward and one backward in turns."""
    parts, unit = [], 27
    for stage, actions in enumerate(one_forward_one_backward(3, 4)):
        y = 40 + stage * 42
        parts.append(text(62, y + 22, f"stage {stage}", 14))
        for kind, m, start in actions:
            width = unit * (1 if kind == "F" else 2)
            fill = RANKS[0] if kind == "F" else RANKS[1]
            parts += [box(110 + start * unit, y, width, 34, fill, "#ffffff")]
            parts += [text(110 + start * unit + width / 2, y + 22, f"{kind}{m}", 12, "#ffffff")]
    parts += [arrow(110, 180, 620, 180), text(365, 198, "time", 12)]
    return picture(640, 210, parts)


PICTURES = {
    "placement": placement, "sbp": sbp, "grid": grid, "boxing": boxing, "duals": duals,
    "stages": stages,
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
