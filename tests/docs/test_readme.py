"""The programs at the head of README.md, run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from consistent import B
from tests.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "README.md"
FIRST, THREE_LINES = "# consistent", "## Your model in three lines"


def program(head: str) -> str:
    """The first block of Python after a heading."""
    found = re.search(
        rf"^{head}$.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, f"{PAGE} has no program under {head!r}"
    return found[1]


def run(text: str) -> dict[str, Any]:
    """The names that a program leaves."""
    names: dict[str, Any] = {}
    exec(compile(text, str(PAGE), "exec"), names)  # noqa: S102
    return names


@on_ranks(2)
def test_first_program(rank: int) -> None:
    found = run(program(FIRST))
    assert found["x"].to_local().shape == (2, 5) and found["w"].grad.sbp == (B,)


@on_ranks(2, 3)
def test_three_lines_more_give_the_losses_of_one_process(rank: int) -> None:
    lines = program(THREE_LINES).splitlines(keepends=True)
    added = [line for line in lines if "consistent" in line]
    assert len(added) == 3
    plain = "".join(line for line in lines if line not in added)
    assert run("".join(lines))["losses"] == pytest.approx(run(plain)["losses"], rel=1e-5)
