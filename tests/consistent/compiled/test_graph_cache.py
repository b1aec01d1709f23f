"""Compiled graphs are read from torch's caches on disk where the same step was compiled before, by
this process or another one, and only there."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor
from torch._dynamo.utils import counters

import consistent
from consistent import B, Placement, S
from consistent.compiled.backends.graph_cache import _wait_for_first_compiler
from tests.ranks import pool
from tests.twins import randn

RANKS = 2


def _made(factor: float) -> Any:
    """A step with a message, a tensor that Python makes, and state that is written in place."""
    p = Placement.all("cpu")
    state = consistent.distribute(torch.zeros(3), p, B)

    def step(x: Any, y: Tensor) -> Tensor:
        sums = (x * torch.tensor([factor, 2.0, 3.0])).sum(0).to_global(sbp=B)
        state.add_(sums)
        return torch.sin(state) + y.sum() + torch.arange(3).div(2)

    return step


def _run(factor: float, x: Tensor, y: Tensor) -> tuple[int, int]:
    """Compile the step, compare it with the step as written, and return how often torch's cache had
    the graph, and how often not."""
    counters.clear()
    step, compiled = _made(factor), consistent.compile(_made(factor))
    for _ in range(3):
        expected, actual = step(x, y).full(), compiled(x, y).full()  # type: ignore[attr-defined]
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


def _compiled(rank: int, tag: str) -> tuple[int, int]:
    p = Placement.all("cpu")
    x, y = (consistent.distribute(randn(4, 3, seed=i), p, S(0)) for i in range(2))
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=tag):  # so that nothing has been cached
        first = _run(1.0, x, y)
        assert _run(1.0, x, y) == (1, 0)
        # Other values of constants, inputs that share memory, another default dtype: other code.
        assert _run(4.0, x, y) in ((0, 1), (1, 0))
        assert _run(1.0, x, x) in ((0, 1), (1, 0))
        torch.set_default_dtype(torch.float64)
        try:
            assert _run(1.0, x, y) in ((0, 1), (1, 0))
        finally:
            torch.set_default_dtype(torch.float32)
    return first


def test_ranks_compile_equal_graphs_once() -> None:
    hits, misses = zip(*pool(RANKS).run(_compiled, uuid.uuid4().hex), strict=True)
    assert (sum(hits), sum(misses)) == (RANKS - 1, 1)


def _forked(compilation: Callable[[], Any]) -> int:
    """Fork a process that compiles the graph "graph" by ``compilation``; return its id."""
    child = os.fork()
    if not child:
        try:
            with _wait_for_first_compiler("graph"):
                compilation()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_what_waits_for_a_compilation_goes_on_when_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    began, begun = os.pipe()
    first = _forked(lambda: (os.write(begun, b"."), time.sleep(60)))
    os.read(began, 1)
    with _wait_for_first_compiler("another graph"):
        pass
    second = _forked(lambda: None)
    time.sleep(0.1)
    assert os.waitpid(second, os.WNOHANG) == (0, 0)
    os.kill(first, signal.SIGKILL)
    assert os.waitpid(first, 0)[1] == signal.SIGKILL
    assert os.waitpid(second, 0)[1] == 0
