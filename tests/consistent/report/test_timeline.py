"""report(timeline=True): when ops, boxings and backward of this rank began and ended."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import consistent
from consistent import B, P, S
from consistent.report import Event, Timeline
from consistent.spec.tracer import Tracer, callbacks, op_tracers
from tests.ranks import on_ranks, pool


def _step(rank: int, folder: str) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(8, 6), p, S(0))
    w = consistent.distribute(torch.randn(6, 4), p, S(1)).requires_grad_()
    before = _listening()
    with consistent.report(timeline=True) as r:
        assert _listening() != before
        (x @ w).sum().backward()
        x.to_global(sbp=B)
    assert r.timeline is not None and r.timeline.rank == rank
    events = {(e.kind, e.name): e for e in r.timeline.events}
    product, gather = events["op", "matmul"], events["boxing", "S(1) -all_gather(0)-> B"]
    assert product.end and gather.end and product.detail == "S(0), S(1) -> S(0)"
    assert product.begin <= gather.begin <= gather.end <= product.end and gather.detail == "matmul"
    assert Path(product.site.rpartition(":")[0]).name == "test_timeline.py" and gather.nbytes == 48
    whole = events["backward", "backward"]
    assert whole.end and product.end <= whole.begin
    inside = [e for e in r.timeline.events if e.kind == "boxing" and e.detail == "backward"]
    assert inside and all(whole.begin <= e.begin <= whole.end for e in inside)
    spent = r.timeline.seconds()
    assert 0 < spent["boxing"] and 0 < spent["computing"]
    assert "and waited for boxings for" in r.summary() and f"rank {rank}" in r.html()
    trace = json.loads(r.save_trace(Path(folder) / f"{rank}.json").read_text())["traceEvents"]
    drawn = [e for e in trace if e["ph"] in "Xi"]
    assert len(drawn) == len(r.timeline.events) and {e["pid"] for e in trace} == {rank}
    assert drawn[0]["ts"] == r.timeline.events[0].begin / 1e3
    assert all(e.get("dur", 0) >= 0 for e in drawn)
    assert not op_tracers and _listening() == before


def _listening() -> list[int]:
    """How many listen to each event."""
    return [len(callbacks(field.name)) for field in fields(Tracer)]


def test_ops_boxings_and_backward_are_timed_and_written_as_a_trace(tmp_path: Path) -> None:
    pool(2).run(_step, str(tmp_path))


@on_ranks(2)
def test_no_times_are_taken_unless_asked(rank: int) -> None:
    with consistent.report() as r:
        assert not callbacks("on_boxing_end")
    assert r.timeline is None
    with pytest.raises(ValueError, match="(?s)took no times.*report\\(timeline=True\\)"):
        r.save_trace("trace.json")


@on_ranks(2)
def test_an_op_that_raises_does_not_upset_the_others(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(8, 6), p, P)
    with consistent.report(timeline=True) as r:
        with pytest.raises(RuntimeError):
            torch.relu(x) @ x
        torch.relu(x)
    assert r.timeline is not None
    assert r.timeline.events[-1].end is not None or r.timeline.events[0].end is not None
    assert [e.end is not None for e in r.timeline.events if e.name == "relu"] == [True, True]


def test_what_lies_inside_is_counted_once() -> None:
    line = Timeline()
    outer = Event("op", "a", 0, end=100, thread=1)
    inner = Event("boxing", "b", 20, end=50, thread=1)
    aside = Event("boxing", "c", 60, thread=1)  # goes on beside the program
    other = Event("op", "d", 200, end=300, thread=1)
    line.events = [outer, inner, aside, other]
    assert line.seconds() == {"computing": pytest.approx(170e-9), "boxing": pytest.approx(30e-9)}
