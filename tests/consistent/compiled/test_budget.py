"""A step that is another one in nearly each call is not compiled for ever."""

from __future__ import annotations

import gc
import importlib
import warnings
from typing import Any

import pytest
import torch

import consistent
from consistent.compiled.backends import inductor

from .test_sizes import compilations, traced


def _longer(x: torch.Tensor, times: int) -> Any:
    for i in range(times):  # another number of ops in each call
        x = x * (i + 2) + i
    return x


def test_graphs_beyond_a_number_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "MAX_COMPILED", 3)
    program = consistent.compile(_longer, backend="inductor", fullgraph=True)
    x = torch.arange(6.0)
    with compilations(traced) as found, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for times in range(1, 7):
            for _ in range(3):
                assert torch.equal(program(x, times), _longer(x, times))
    assert len(found) == 3 and len(program.programs) == 6
    assert [str(w.message)[:64] for w in told if "were compiled" in str(w.message)] == [
        "consistent.compile: 3 graphs of this step were compiled, nearly "
    ]


def test_a_program_that_is_dropped_leaves_no_source() -> None:
    sources: Any = importlib.import_module("torch.fx.graph_module")
    program = consistent.compile(_longer, backend="ops", fullgraph=True)
    program._max_programs, x, seen = 2, torch.arange(6.0), []
    for times in range(1, 7):
        for _ in range(3):
            program(x, times)
        gc.collect()
        seen.append(len(sources._loader.eval_cache))
    assert len(program.programs) == 2 and seen[1:] == [seen[1]] * 5
