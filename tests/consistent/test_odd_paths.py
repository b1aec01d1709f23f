"""A program whose path is not UTF-8 does all that others do, and its messages may be printed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S, checkpoint
from tests.ranks import on_ranks

NAME = os.fsdecode(b"/home/caf\xe9/pr\xe9.py")
PROGRAM = """
def differ(x, rank):
    return x.full() if rank == 0 else x.sum().item()

def step():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

def again(step):
    return [step().item() for _ in range(3)]
"""


def _program(**names: Any) -> dict[str, Any]:
    made = {"__name__": "program", **names}
    exec(compile(PROGRAM, NAME, "exec"), made)
    return made


def _printable(error: BaseException) -> str:
    text = str(error)
    text.encode()  # as print does
    return text


@on_ranks(2)
def test_messages_reports_and_compiled_steps(rank: int, tmp_path: Path) -> None:
    placement = consistent.Placement.all("cpu")
    x: Any = consistent.distribute(torch.arange(32.0).view(8, 4), placement, S(0))
    model: Any = consistent.parallelize(torch.nn.Linear(4, 4), placement, "zero3", verbose=False)
    made = _program(x=x, model=model, optimizer=torch.optim.SGD(model.parameters(), 1e-3))
    with pytest.raises(RuntimeError, match=r"caf\\udce9.pr\\udce9.py:3 in differ") as raised:
        made["differ"](x, rank)
    _printable(raised.value)
    with consistent.check_mode(), pytest.raises(RuntimeError, match=r"pr\\udce9.py:3") as raised:
        made["differ"](x, rank)
    _printable(raised.value)
    with consistent.report() as report:
        loss = made["step"]()
    assert r"pr\udce9.py" in str(report)
    str(report).encode()
    for name in ("report.html", "trace.json"):
        report.save(tmp_path / f"{rank}-{name}")
    step = consistent.compile(made["step"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        later = made["again"](step)
    assert any("is not UTF-8, and torch's compiler" in str(each.message) for each in said)
    assert later == sorted(later, reverse=True) and later[0] < loss.item()
    assert r"pr\udce9.py" in step.show()
    step.show().encode()


@on_ranks(2)
def test_checkpoints(rank: int, tmp_path: Path) -> None:
    folder = os.path.join(os.fspath(tmp_path), os.fsdecode(b"caf\xe9"))
    os.makedirs(folder, exist_ok=True)
    placement = consistent.Placement.all("cpu")
    x: Any = consistent.distribute(torch.arange(6.0), placement, S(0))
    held = torch.nn.ParameterDict({"x": torch.nn.Parameter(x)})
    back: Any = torch.nn.ParameterDict(
        {"x": consistent.zeros(6, placement=placement, sbp=B, requires_grad=True)}
    )
    for step, wait in enumerate((True, False)):
        checkpoint.save(folder, model=held, step=step, wait=wait, where=Path(folder))
        checkpoint.wait()
        assert checkpoint.load(folder, model=back) == {"step": step, "where": Path(folder)}
    for name in ("x.safetensors", "x.pt"):
        checkpoint.save_full(held, os.path.join(folder, name))
        checkpoint.load(os.path.join(folder, name), model=back)
        assert torch.equal(back["x"].full(), torch.arange(6.0))
    with pytest.raises(FileNotFoundError, match=r"caf\\udce9/none") as raised:
        checkpoint.load(os.path.join(folder, "none"))
    _printable(raised.value)
