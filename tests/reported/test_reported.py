"""Programs of public reports have the values of one process here, and the page shows them all."""

from __future__ import annotations

import re

import pytest
import torch

from tests.generated import generator

from .report import REPORTS
from .run import outcomes


def test_each_program_has_the_values_of_one_process() -> None:
    for each in REPORTS:
        wanted = f"raises {each.refused.__name__}" if each.refused else ""
        for rank, outcome in enumerate(outcomes()[each.name]):
            assert not outcome.alone, f"{each.name} on one process: {outcome.alone}"
            assert outcome.here == wanted, f"{each.name} on rank {rank}: {outcome.here}"
    # In one test, for what follows would run all of them again on another worker.
    if not re.match(r"2\.13\.", torch.__version__):
        pytest.skip("the page shows what this torch's rivals give")
    make = generator("make_wrong_elsewhere")
    assert make.PAGE.read_text().rstrip() == make.page().rstrip(), (
        "run python docs/make_wrong_elsewhere.py"
    )
    assert make.counts()["wrong"] >= 12


def test_reports_and_programs_are_different_ones() -> None:
    assert len(REPORTS) >= 40
    for of in (lambda each: each.name, lambda each: each.program):
        assert len({of(each) for each in REPORTS}) == len(REPORTS)
