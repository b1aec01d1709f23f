"""Pictures of plans: they show every rank and every choice, as text and as SVG."""

from __future__ import annotations

from pathlib import Path

from consistent.auto.pictures import MemoryPicture, StepPicture
from consistent.drawing.words import seconds_text
from tests.consistent.auto.strategies.test_search import found_on_two_ranks


def test_pictures_of_a_search(tmp_path: Path) -> None:
    found = found_on_two_ranks()
    picture = found.picture()
    assert str(found.tried[0].choice) in picture.text()
    assert picture.save(tmp_path / "costs.svg").read_text().count("<rect") > 10
    report = found.tried[0].report
    assert report is not None
    memory = MemoryPicture(report.peaks, limit=2.0 * report.peak_bytes)
    assert "parameters" in memory.text() and "a device has" in memory.svg()
    step = StepPicture(report.timeline)
    assert seconds_text(report.seconds) in step.text()
    assert all(f"rank {rank}" in step.svg() for rank in report.timeline.tracks)
