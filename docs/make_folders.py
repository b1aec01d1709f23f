"""Draws docs/pictures/folders.svg: `python docs/make_folders.py`. The arrows are the imports of the
sources, as tests/test_floors.py reads them; what each folder is for is what README.md says."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from make_drawings import FOLDER, LINE, PALE, arrow, box, picture, text  # noqa: E402

from tests.test_floors import importers, sources_of  # noqa: E402

WIDE, HIGH, ACROSS, DOWN = 190, 44, 20, 30  # a box, and the space between two
LANE = 14  # between two arrows that pass beside the floors

# Public names import all folders and nothing of the library imports them; the doctor imports none.
LEFT_OUT = ("consistent", "__main__", "doctor")


def folder_of(module: str) -> str:
    """`mirrored` is one folder; of `consistent`, each folder in it is one."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "consistent" and rest else top


def imported() -> dict[str, set[str]]:
    """Folder -> the folders that its files import."""
    edges: dict[str, set[str]] = {}
    for module, targets in importers(sources_of("")).items():
        here = folder_of(module)
        edges.setdefault(here, set()).update(map(folder_of, targets))
    return {a: edges[a] - {a, *LEFT_OUT} for a in edges if a not in LEFT_OUT}


def skeleton(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows but for those that follow from others: with a -> b and b -> c, no a -> c."""

    def below(a: str) -> set[str]:
        return set().union(*({b} | below(b) for b in edges[a]))

    return sorted(
        (a, b) for a in edges for b in edges[a] if not any(b in below(c) for c in edges[a])
    )


def purposes() -> dict[str, str]:
    """Folder -> what it is for: the words of the map in README.md, up to a colon or semicolon."""
    lines = re.findall(r"^ *(\w+)/ +(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {name: re.split("[:;]", words)[0] for name, words in lines}


def rows_of(edges: dict[str, set[str]]) -> list[list[str]]:
    """The folders from the top down: each stands above all that it uses, and as near as it can to
    the lowest that uses it."""
    height: dict[str, int] = {}

    def lowest(name: str) -> int:
        if name not in height:
            height[name] = max((lowest(b) + 1 for b in edges[name]), default=0)
        return height[name]

    for name in sorted(edges, key=lowest, reverse=True):
        users = [height[a] for a in edges if name in edges[a]]
        height[name] = min(users, default=height[name] + 1) - 1
    return [
        sorted(name for name in edges if height[name] == h)
        for h in sorted(set(height.values()), reverse=True)
    ]


def folders() -> str:
    edges, words = imported(), purposes()
    rows = rows_of(edges)
    inner = max(map(len, rows)) * (WIDE + ACROSS) - ACROSS
    level = {name: r for r, row in enumerate(rows) for name in row}
    arrows = skeleton(edges)
    far = [(a, b) for a, b in arrows if level[b] > level[a] + 1]
    left = LANE * len(far) + 10.0
    at = {
        name: (
            left + (inner + ACROSS - len(row) * (WIDE + ACROSS)) / 2 + k * (WIDE + ACROSS),
            10 + r * (HIGH + DOWN),
        )
        for r, row in enumerate(rows)
        for k, name in enumerate(row)
    }
    parts = [part for name, (x, y) in at.items() for part in _folder(name, words[name], x, y)]
    for a, b in arrows:
        if (a, b) not in far:
            parts.append(arrow(at[a][0] + WIDE / 2, at[a][1] + HIGH, at[b][0] + WIDE / 2, at[b][1]))
    middle = left + (inner - WIDE) / 2
    sides = {-1: left, 1: left + inner}
    for a, b in far:
        side = -1 if at[a][0] + at[b][0] < 2 * middle else 1
        sides[side] += side * LANE
        parts.append(_around(at[a], at[b], sides[side]))
    return picture(int(2 * left + inner), len(rows) * (HIGH + DOWN), parts)


def _folder(name: str, words: str, x: float, y: float) -> Iterator[str]:
    yield box(x, y, WIDE, HIGH, PALE)
    yield text(x + WIDE / 2, y + 16, name, 13)
    short = textwrap.shorten(words, 33, placeholder=" …")
    yield text(x + WIDE / 2, y + 33, short, 10, "#52606d")


def _around(a: tuple[float, float], b: tuple[float, float], x: float) -> str:
    """An arrow that passes beside the floors between, at ``x``."""
    ya, yb = a[1] + HIGH, b[1]
    path = (
        f"M{a[0] + WIDE / 2:g} {ya:g} V{ya + DOWN / 3:g} H{x:g} V{yb - DOWN / 2:g} "
        f"H{b[0] + WIDE / 2:g} V{yb:g}"
    )
    return (
        f"<path d='{path}' fill='none' stroke='{LINE}' stroke-width='1.2' marker-end='url(#tip)'/>"
    )


def main() -> None:
    (FOLDER / "folders.svg").write_text(folders())


if __name__ == "__main__":
    main()
