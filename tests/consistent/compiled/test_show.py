"""What step.show("step.html") writes: the program, all of it, and nothing from elsewhere."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.compiled.listing import rows
from consistent.spec.bytes_text import bytes_text
from tests.consistent.report.test_compiled import trained
from tests.pages import Page
from tests.ranks import on_ranks, pool
from tests.twins import randn


def _page(rank: int, optimizer: str, folder: str) -> str:
    step, _ = trained(optimizer, "ops")
    path = Path(folder) / "new" / f"{rank}.html"
    text = step.show(path)
    assert text == step.show()
    program = step.programs[-1].program
    page, made = Page(path.read_text()), list(rows(program))
    assert page.text.startswith("consistent: Program of trained.<locals>.step")
    assert f"{bytes_text(program.bytes)} sent by this rank" in page.text
    # Every op is a row, with its bytes, and what sends is marked.
    shown = [row for row in made if row.kind not in ("read", "put")]
    assert [cells[1] for cells in page.tables["lines"][1:]] == [row.text for row in shown]
    sends = [row for row in shown if row.kind in ("message", "start")]
    assert len(sends) == len(program.messages())
    lines = [cells for cells in page.tables["lines"][1:] if cells[4]]
    assert [cells[4] for cells in lines] == [bytes_text(row.sent or 0) for row in sends if row.sent]
    assert len(page.marked) >= len(sends) and all(
        any(row.text in mark for mark in page.marked) for row in sends
    )
    reads = [row.text for row in made if row.kind == "read"]
    assert [cells[0] for cells in page.tables["read"][1:]] == reads
    # The step is there as it is written, and its bytes stand at the lines that send them.
    listing = page.tables["listing"]
    source = {cells[1]: cells for cells in listing if len(cells) > 2}
    assert listing[0] == ["trained.step test_compiled.py:" + listing[1][0]]
    assert "optim.zero_grad()" in source and "loss.backward()" in source
    assert sum(_number(cells[-1]) for cells in source.values()) == pytest.approx(
        program.bytes, rel=0.01
    )
    if optimizer == "AdamW":
        assert "model(x).square().mean()" in "".join(source)
    else:
        assert "SGD.step runs as it is written" in page.text
    return path.read_text()


def _number(text: str) -> float:
    found = re.fullmatch(r"([\d.]+) (B|KiB)", text)
    return float(found[1]) * (1024 if found[2] == "KiB" else 1) if found else 0.0


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_page_holds_the_program_and_is_equal_on_all_ranks(optimizer: str, tmp_path: Path) -> None:
    found = pool(2).run(_page, optimizer, str(tmp_path))
    assert found[0] == found[1]


def _twice(x: Any) -> Any:
    return torch.tanh(x.to_global(sbp=B)) + torch.exp(x.to_global(sbp=B))


@on_ranks(2)
def test_other_pages(rank: int) -> None:
    step: Any = consistent.compile(_twice, backend="ops")
    with pytest.raises(RuntimeError, match="not recorded yet.*step.html"):
        step.show("step.html")
    for rows_ in (4, 8):
        x = consistent.distribute(randn(rows_, 3), Placement.all("cpu"), S(0))
        for _ in range(2):
            step(x)
    with pytest.raises(ValueError, match="'step.txt' ends in '.txt'"):
        step.show("step.txt")
    page = Page(_written(step))
    why = "merge_equal: its result is there already"
    assert [row[:4] for row in page.tables["saved"][1:]] == [
        ["all_gather_into_tensor", "1", "96 B", why]
    ]
    text = page.text
    assert "The step has 1 other program" in text and "1 message sends 96 B" in text

    reading: Any = consistent.compile(lambda x: x * x.sum().item(), backend="ops")
    with pytest.warns(UserWarning, match="not as a program") as warned:
        for _ in range(2):
            reading(x)
    assert warned[0].filename == __file__
    assert "reads a value that the step computes" in Page(_written(reading)).text


def _written(step: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        step.show(f"{folder}/step.html")
        return (Path(folder) / "step.html").read_text()


def _staged(rank: int, folder: str) -> str:
    torch.manual_seed(0)
    places = [Placement("cpu", [0]), Placement("cpu", [1])]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    pipe = consistent.nn.pipeline(
        model, places, ["2"], loss=nn.functional.mse_loss, micro_batches=4
    )
    with pytest.raises(RuntimeError, match="Sequential.show: no step ran yet"):
        pipe.show()
    pipe.step(randn(8, 4).float(), randn(8, 4).float())
    path = Path(folder) / f"{rank}.html"
    text = pipe.show(path)
    assert "stage 0  F0 F1" in text and "stage 0 -> 1" in text
    page = Page(path.read_text())
    assert page.text.count("to stage 1") == page.text.count("from stage 0") == 1
    assert "stage 0 placement(" in page.text and "stage 1 placement(" in page.text
    for part in ("4 micro-batches", "64 B moved forward for each micro-batch"):
        assert part in page.text, page.text
    first, second = page.text.split("stage 1 placement(")
    assert "Linear(%" in first and "backward %" in second and "mse_loss(" in second
    assert "parameters: 160 B on a rank" in first and "parameters: 144 B on a rank" in second
    return path.read_text()


def test_stages_side_by_side(tmp_path: Path) -> None:
    found = pool(2).run(_staged, str(tmp_path))
    assert found[0] == found[1]
