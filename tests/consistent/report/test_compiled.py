"""A report around a compiled step: its messages and their bytes, its ops between them, times."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.spec.tracer import callbacks
from tests.pages import Page
from tests.ranks import ALL, on_ranks, pool
from tests.twins import randn


def trained(optimizer: str, backend: str) -> tuple[Any, Any]:
    """A step of a small model on all ranks, which has been recorded, and its batch."""
    torch.manual_seed(0)
    placement = Placement.all("cpu")
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    consistent.parallelize(model, placement, "zero3" if optimizer == "AdamW" else "data")
    optim = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

    @consistent.compile(backend=backend, fullgraph=True)
    def step(x: Any) -> Any:
        optim.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        return loss

    batch = consistent.distribute(randn(8, 8).float(), placement, S(0))
    for _ in range(5):  # Inductor lays gradients in other memory, which is recorded once more
        step(batch)
    return step, batch


def _reported(rank: int, optimizer: str, backend: str, folder: str) -> tuple[str, int]:
    step, batch = trained(optimizer, backend)
    program = step.programs[-1].program
    with consistent.report(timeline=True) as r:
        step(batch)
        step(batch)
    assert not callbacks("on_compiled") and r.timeline is not None
    assert r.nbytes == 2 * program.bytes > 0
    lines = [line for line in r.lines if line.compiled]
    assert sum(line.boxings.total() for line in lines) == 2 * len(program.messages()), str(r)
    assert sum(line.count for line in lines) == 2 and "2 compiled steps ran" in r.summary()
    assert all(line.op == program.name for line in lines)
    assert {Path(line.site.rpartition(":")[0]).name for line in lines} == {"test_compiled.py"}

    events = r.timeline.events
    whole = [e for e in events if e.name == f"{program.name}, compiled"]
    assert len(whole) == 2 and all(e.end for e in whole)
    inside = [e for e in events if e.begin >= whole[1].begin and e is not whole[1]]
    assert all(whole[1].begin <= e.begin and (e.end or 0) <= (whole[1].end or 0) for e in inside)
    assert sum(e.nbytes for e in inside) == program.bytes
    assert any(e.kind == "op" and "mm" in e.name for e in inside)
    if optimizer == "SGD":
        assert [e.name for e in inside if e.name == "SGD.step"] == ["SGD.step"]
        # Reductions go on beside the ops, and are waited for later.
        begun = [e for e in inside if e.nbytes and e.end is None]
        waited = [e for e in inside if e.name.startswith("wait for ")]
        assert len(begun) == len(waited) > 0 and all(e.end and not e.nbytes for e in waited)

    trace = json.loads(r.save_trace(Path(folder) / f"{rank}.json").read_text())["traceEvents"]
    assert sum(e["args"].get("bytes", 0) for e in trace) == r.nbytes
    assert {e["pid"] for e in trace} == {rank}
    page = r.html()
    assert "http" not in page.replace("http-equiv", "") and "compiled step" in page
    return r.summary().partition(" Rank ")[0], r.nbytes


WAYS = [("AdamW", "ops"), ("SGD", "ops"), ("SGD", "inductor"), ("AdamW", "inductor")]


@pytest.mark.parametrize(("optimizer", "backend"), WAYS if ALL else WAYS[:3])
def test_messages_and_ops_of_a_compiled_step_are_reported(
    optimizer: str, backend: str, tmp_path: Path
) -> None:
    found = pool(2).run(_reported, optimizer, backend, str(tmp_path))
    assert found[0] == found[1]


@on_ranks(2)
def test_messages_beside_ops_are_reported(rank: int) -> None:
    p = Placement.all("cpu")
    first, second = (consistent.distribute(randn(7, 7, seed=i), p, S(0)) for i in (1, 2))

    @consistent.compile(backend="ops", fullgraph=True, overlap=True)
    def step(x: Any) -> Any:
        h = torch.tanh(x @ first.to_global(sbp=B))
        return torch.tanh(h @ second.to_global(sbp=B))

    x = consistent.distribute(randn(6, 7), p, S(0))
    for _ in range(2):
        step(x)
    program = step.programs[-1].program
    with consistent.report(timeline=True) as r:
        step(x)
    assert r.nbytes == program.bytes > 0 and r.boxings() == {"S(0) -all_gather_into_tensor-> B": 2}
    assert r.timeline is not None
    sends = [(e.name, e.nbytes > 0, e.end is None) for e in r.timeline.events if e.kind == "boxing"]
    assert sends == [
        ("S(0) -all_gather_into_tensor-> B", True, False),
        ("S(0) -all_gather_into_tensor-> B", True, True),  # goes on beside the product
        ("S(0) -wait for all_gather_into_tensor-> B", False, False),
    ]
    # The page and the text have both halves, with their layouts, and what the pass did.
    (note,) = program.notes
    with tempfile.TemporaryDirectory() as folder:
        text = step.show(f"{folder}/step.html")
        page = Page((Path(folder) / "step.html").read_text())
    assert note in text and note in page.text and "1 messages run beside ops" in note
    rows = [
        cells[2] for cells in page.tables["lines"][1:] if " all_gather_into_tensor(" in cells[1]
    ]
    assert rows == ["f64[7, 7] B from S(0)"] * 3, rows
