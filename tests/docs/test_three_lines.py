"""The program of README.md under "Your model in three lines", run as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "README.md"
HEAD = "Your model in three lines"


def program() -> str:
    """The first block of Python after the heading."""
    found = re.search(rf"{HEAD}.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, f"{PAGE} has no program under {HEAD!r}"
    return found[1]


def run(text: str) -> list[float]:
    """The losses that a program makes."""
    names: dict[str, object] = {}
    exec(compile(text, str(PAGE), "exec"), names)  # noqa: S102
    losses = names["losses"]
    assert isinstance(losses, list)
    return losses


@on_ranks(2, 3)
def test_three_lines_more_give_the_losses_of_one_process(rank: int) -> None:
    lines = program().splitlines(keepends=True)
    added = [line for line in lines if "consistent" in line]
    assert len(added) == 3
    plain = "".join(line for line in lines if line not in added)
    assert run("".join(lines)) == pytest.approx(run(plain), rel=1e-5)
