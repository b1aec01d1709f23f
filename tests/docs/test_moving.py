"""The program of docs/moving.md, run as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"


def losses(text: str) -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(text, str(PAGE), "exec"), names)  # noqa: S102
    return names["losses"]


@on_ranks(2)
def test_a_job_that_moves_has_the_losses_of_one_that_stays(rank: int) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    stays = program.replace("step == 3", "False")
    assert stays != program and losses(program) == pytest.approx(losses(stays), rel=1e-5)
