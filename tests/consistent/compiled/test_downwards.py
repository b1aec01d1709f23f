"""A later call of a compiled step runs down the floors: no file calls one of a higher floor."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

import consistent
from consistent import Placement, S
from tests.test_floors import FILES, floor_of, module_of

MODULES = {str(path): module_of(path) for path in FILES}


def module_of_frame(frame: FrameType | None) -> str | None:
    """The library's module that runs in the frame or, where it is torch's, in the next one out."""
    while frame is not None:
        if frame.f_code.co_filename in MODULES:
            return MODULES[frame.f_code.co_filename]
        frame = frame.f_back
    return None


def test_a_later_call_calls_downwards_only() -> None:
    p = Placement("cpu", 0)
    weight = torch.nn.Parameter(consistent.distribute(torch.randn(8, 6), p, S(1)))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @consistent.compile(backend="ops")
    def step(batch: dict[str, Any]) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = (batch["x"] @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    called: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in MODULES:
            caller = module_of_frame(frame.f_back)
            if caller is not None:
                called.append((caller, MODULES[frame.f_code.co_filename]))

    batch = {"x": consistent.distribute(torch.randn(4, 8), p, S(0))}
    step(batch)
    step(batch)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step(batch)
    finally:
        sys.setprofile(before)
    assert ("consistent.compiled.compile", "consistent.compiled.recording") in called
    assert [(a, b) for a, b in called if floor_of(b) > floor_of(a)] == []
