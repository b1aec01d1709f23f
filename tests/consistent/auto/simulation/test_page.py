"""The page and the trace of a simulated step: what they say is what the step has."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import consistent
from consistent.auto import SimulatedStep
from consistent.auto.simulation.report import seconds_text
from consistent.spec.bytes_text import bytes_text
from tests.pages import Page

from .programs import Stages, begin, begin_stages


def _step(ranks: int, begin: Any, *args: Any) -> SimulatedStep:
    with consistent.simulate(ranks, "a100-8") as sim:
        step = begin(*args)
        step()
        step()
        return sim.report()


MADE = {
    "zero3": lambda: _step(4, begin, 4, "zero3", (4,)),
    "tensor": lambda: _step(4, begin, 4, "tensor", (4,)),
    "1f1b": lambda: _step(2, begin_stages, Stages()),
}


@pytest.mark.parametrize("name", ["zero3", "tensor", "1f1b"])
def test_a_page_and_a_trace_hold_the_step(name: str, tmp_path: Path) -> None:
    step = MADE[name]()
    page = Page(step.save(tmp_path / "new" / "step.html").read_text())
    assert step.limit in page.text and f"{seconds_text(step.seconds)} a step" in page.text
    assert f"{bytes_text(step.peak_bytes)} at most on a rank" in page.text
    for rank, peak in step.peaks.items():
        assert f"rank {rank} {bytes_text(peak.bytes)}, " in page.text
    for rank, sent in step.bytes_of.items():
        assert f"rank {rank} {bytes_text(sent)}" in page.text
        assert sent == sum(of.get(rank, 0) for of in step.sent.values())

    # Every event is drawn in the lane of its rank, with the bubble between them.
    spans = [span for track in step.timeline.tracks.values() for span in track.spans]
    lanes = [lane for lane, _ in page.data["lanes"]]
    drawn = Counter(lanes[event[0]].rpartition(" ")[0] for event in page.data["events"])
    bubbles = sum(event[1] == "bubble" for event in page.data["events"])
    assert drawn.total() == len(spans) + bubbles
    assert set(drawn) == {f"rank {rank}" for rank in step.timeline.tracks}
    assert bool(bubbles) == (name == "1f1b") == any("schedule" in lane for lane in lanes)
    rows = page.tables["lines"][1:]
    assert sum(int(row[2].replace(",", "")) for row in rows) == len(step.slowest.spans)
    boxings = {span.name for span in step.slowest.spans if span.kind in ("boxing", "wire")}
    assert len(boxings) == len({row[1] for row in rows if row[0] in ("boxing", "beside compute")})
    assert len(page.marked) == len([row for row in rows if row[0] in ("boxing", "beside compute")])

    trace = json.loads(step.save_trace(tmp_path / "step.json").read_text())["traceEvents"]
    for rank, sent in step.bytes_of.items():
        mine = [event for event in trace if event["pid"] == rank and event["ph"] == "X"]
        assert sum(event["args"]["bytes"] for event in mine) == sent
    assert any(step.bytes_of.values())


def test_a_step_that_does_not_fit_is_marked() -> None:
    step = _step(1, begin, 1, "data", (1,))
    assert "does not fit" not in step.html()
    assert isinstance(step, SimulatedStep) and not any(step.bytes_of.values())
    assert "Bytes by link" not in step.html()
    step.machine = dataclasses.replace(step.machine, memory_bytes=1000)
    assert "does not fit on rank 0" in step.html()
