"""The options of a compiled step: one list, taken alike by every call that compiles."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import pytest
import torch

import consistent
from consistent.compiled import CompileOptions, Options
from consistent.step import GraphConfig

NAMES = [field.name for field in fields(CompileOptions)]
WRONG: dict[str, Any] = {
    "backend": "inductr",
    "layouts": "all",
    "memory": -1,
    "overlap": "no",
    "fuse": 3,
    "cuda_graph": "yes",
}


def test_each_call_that_compiles_takes_every_option() -> None:
    assert list(get_type_hints(Options)) == NAMES
    for call, own in ((consistent.compile, 1), (GraphConfig.enable_compile, 2)):
        shown = list(inspect.signature(call).parameters.values())[own:]
        assert [p.name for p in shown] == NAMES
        assert [p.default for p in shown] == [getattr(CompileOptions(), n) for n in NAMES]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_by_the_call_that_was_given_it(name: str) -> None:
    given = {name: WRONG[name]}
    with pytest.raises(ValueError, match=f"^consistent.compile: {name} is "):
        consistent.compile(**given)
    with pytest.raises(ValueError, match=f"^enable_compile: {name} is "):
        GraphConfig().enable_compile(**given)


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CompileOptions().memory = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="memry"):
        consistent.compile(memry=5)  # type: ignore[call-arg]


def test_a_config_takes_options_as_attributes_too() -> None:
    config = GraphConfig()
    assert config.backend is None and not config.is_compiled
    config.memory, config.backend = 5, "ops"
    assert config.is_compiled and config.options == CompileOptions(backend="ops", memory=5)
    with pytest.raises(ValueError, match="memory is -1"):
        config.memory = -1
    config.backend = None
    assert not config.is_compiled and config.memory == 5


def test_a_method_has_the_options_of_its_class() -> None:
    class Steps:
        @consistent.compile(backend="ops", fullgraph=True, memory=7)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    assert Steps().step.options == CompileOptions(backend="ops", fullgraph=True, memory=7)
