"""visualize(schedule): what each placement does when."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

import consistent
from consistent.pipeline.schedules import SCHEDULES, schedule


def test_a_schedule_as_text() -> None:
    assert consistent.visualize(schedule("1f1b", 2, 2, 3)).text() == (
        """\
1f1b: 2 stages, 3 micro-batches; placements stand idle 25% of the time

stage 0  F0 F1       B0    F2 B1       B2
stage 1     F0 B0    F1 B1    F2 B2

F forward; B backward"""
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_fits_its_width_and_is_drawn(name: str) -> None:
    stages = 2 * (SCHEDULES[name].stages_per_line or 2)
    picture = consistent.visualize(schedule(name, 2, stages, 12))
    assert max(map(len, picture.text().splitlines())) <= 80
    ElementTree.fromstring(picture.svg())
