"""The op and the boxing that a thread is in are read off its frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, Placement, S
from consistent.dispatch.running.current_op import current_op
from consistent.spec.tracer import Tracer
from mirrored.transports.in_process import run_ranks

TWO = Placement("cpu", (0, 1))
ON_TWO = 'on placement("cpu", ranks=[0, 1])'


def ones(sbp: Any, *shape: int) -> torch.Tensor:
    return consistent.ones(*shape, placement=TWO, sbp=sbp)


def frames_of_library() -> list[FrameType]:
    """Those of this thread from the innermost one of consistent/ on."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frames or frame.f_globals.get("__name__", "").startswith("consistent."):
            frames.append(frame)
        frame = frame.f_back
    return frames


def backward() -> None:
    x = ones(S(0), 4, 2).requires_grad_()
    x.to_global(sbp=B).sum().backward()


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: ones(S(0), 4).to_global(sbp=B), f"to_global, f32[4] S(0) -> B {ON_TWO}"),
    (lambda: ones(S(0), 4).full(), f"full, f32[4] S(0) -> B {ON_TWO}"),
    (lambda: ones(P, 1).item(), f"item, f32[1] P -> B {ON_TWO}"),
    (lambda: ones(S(0), 4) + ones(P, 4), f"add, f32[4] P -> S(0) {ON_TWO}"),
    (lambda: torch.add(ones(S(0), 4), ones(P, 4)), f"add, f32[4] P -> S(0) {ON_TWO}"),
    (lambda: ones(S(0), 4).add_(ones(P, 4)), f"add, f32[4] P -> S(0) {ON_TWO}"),
    (backward, f"backward, f32[4, 2] P -> S(0) {ON_TWO}"),
]


def said_at_boxings(program: Callable[[int], Any], ranks: int) -> list[str]:
    seen: list[str] = []

    def observe(*_: Any) -> None:
        seen.append(current_op(frames_of_library()))

    with Tracer(on_boxing_begin=observe).tracing():
        run_ranks(program, ranks)
    return seen


@pytest.mark.parametrize(
    ("program", "said"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_op_that_boxes_is_named(program: Callable[[], Any], said: str) -> None:
    seen = said_at_boxings(lambda _: program(), 2)
    assert said in seen, seen


def two_axes_and_two_placements(rank: int) -> None:
    grid = Placement("cpu", ((0, 1), (2, 3)))
    x = consistent.ones(4, 4, placement=grid, sbp=(S(0), P))
    x.to_global(sbp=(B, S(1)))
    ones(B, 4).to_global(placement=Placement("cpu", (2, 3)), sbp=S(0))


def test_several_axes_and_two_placements_are_named() -> None:
    seen = said_at_boxings(two_axes_and_two_placements, 4)
    assert any("(S(0), P) -> (B, S(1)) on placement" in text for text in seen), seen
    other = 'B on placement("cpu", ranks=[0, 1]) -> f32[4] S(0) on placement("cpu", ranks=[2, 3])'
    assert any(other in text for text in seen), seen


def test_a_thread_in_no_op_has_none() -> None:
    assert current_op([sys._getframe()]) == ""
