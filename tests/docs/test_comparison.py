"""The programs of docs/comparison/ give the losses of one device, and the page counts lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.ranks import ALL
from tests.scripts import module_of

FOLDER = Path(__file__).parents[2] / "docs" / "comparison"
PROGRAMS = ["ours", "with_dtensor"] + (["with_fsdp_pipeline"] if ALL else [])


@pytest.fixture(scope="module")
def one_device() -> str:
    return launch(FOLDER / "model.py", ranks=1).printed[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_losses_of_one_device(name: str, one_device: str) -> None:
    done = launch(FOLDER / f"{name}.py", ranks=2)
    assert done.status == 0, done.errors
    assert done.printed[0] == one_device and "MLP: loss" in one_device


def test_a_cut_that_costs_more_gives_the_same_losses(one_device: str) -> None:
    assert launch(FOLDER / "ours.py", "--wrong", "cut", ranks=2).printed[0] == one_device


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("dim", "S(2) splits dim 2 of a tensor of shape (128, 32)"),
        ("inputs", "the ranks have diff"),
    ],
)
def test_what_is_said_wrongly_is_an_error_on_every_rank(wrong: str, words: str) -> None:
    done = launch(FOLDER / "ours.py", "--wrong", wrong, ranks=2)
    assert done.status and all(words in each for each in done.errors), done.errors


def test_the_page_counts_lines_and_names() -> None:
    page = (FOLDER.parent / "comparison.md").read_text()
    for row in module_of(FOLDER / "count.py").rows():
        assert row in page, "python docs/comparison/count.py writes the rows"
