"""Names that other libraries have: an AttributeError says what to call instead."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

import consistent
import mirrored
from consistent import S, sbp
from consistent.nn.planners.registry import PLANNERS
from consistent.spec.elsewhere import PACKAGE_HINTS, PART_HINTS, PLAN_HINTS, TENSOR_HINTS
from tests.each_of import each_of

HERE = consistent.placement("cpu", [0])


def tensor() -> consistent.GlobalTensor:
    return consistent.zeros(2, placement=HERE, sbp=S(0))


@each_of("name", TENSOR_HINTS)
def test_a_tensor_hints_at_the_name_here(name: str) -> None:
    whose, instead = TENSOR_HINTS[name]
    for asked in (tensor(), consistent.GlobalTensor):
        with pytest.raises(AttributeError, match=re.escape(instead)) as error:
            getattr(asked, name)
        assert whose in str(error.value)
    assert not hasattr(tensor(), name) and not hasattr(torch.Tensor, name)


@each_of("name", PACKAGE_HINTS)
def test_the_package_hints_at_the_name_here(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(PACKAGE_HINTS[name][1])):
        getattr(consistent, name)
    assert not hasattr(consistent, name)


@each_of("name", PACKAGE_HINTS)
def test_a_name_that_is_imported_has_the_same_hint(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(PACKAGE_HINTS[name][1])):
        exec(f"from consistent import {name}", {})


@each_of("part", [consistent.nn, consistent.data, consistent.checkpoint, sbp])
@each_of("name", PART_HINTS)
def test_a_part_of_the_package_hints_at_the_name_here(part: ModuleType, name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(PART_HINTS[name][1])):
        getattr(part, name)
    assert not hasattr(part, name)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from consistent import Placment", "Did you mean 'placement'?"),
        ("from consistent.nn import Pipelin", "Did you mean 'pipeline'?"),
        ("consistent.GlobalTensr", "Did you mean 'GlobalTensor'?"),
        ("consistent.data.DataLoader", "Did you mean 'loader'?"),
        ("consistent.matmul", "It is torch's own: torch.matmul."),
        ("consistent.nn.Linear", "It is torch's own: torch.nn.Linear."),
    ],
)
def test_a_mistyped_name_has_the_nearest_one(code: str, said: str) -> None:
    with pytest.raises((AttributeError, ImportError), match=re.escape(said)):
        exec(code, {"consistent": consistent})


def test_packages_that_nothing_imported_yet_can_be_imported() -> None:
    for name in ("flow", "integrations", "command"):
        exec(f"from consistent import {name}", {})


@pytest.mark.parametrize("name", [*PLAN_HINTS, "Tensor Parallel", "data_parallel"])
def test_a_plan_hints_at_the_name_here(name: str) -> None:
    instead = PLAN_HINTS.get(name, name.split()[0].split("_")[0].lower())
    with pytest.raises(ValueError, match=re.escape(instead.strip('"'))):
        consistent.parallelize(torch.nn.Linear(2, 2), HERE, name)


def test_other_unknown_names_raise_as_before() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        _ = tensor().nothing  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        _ = consistent.nothing  # type: ignore[attr-defined]


def test_an_attribute_that_a_program_sets_is_its_own() -> None:
    x = tensor()
    x.sharding = "mine"  # type: ignore[attr-defined]
    assert x.sharding == "mine"  # type: ignore[attr-defined]


def test_what_the_hints_name_is_there() -> None:
    plans = [("", instead) for instead in PLAN_HINTS.values()]
    tables = (TENSOR_HINTS, PACKAGE_HINTS, PART_HINTS)
    for _, instead in [*plans, *(entry for table in tables for entry in table.values())]:
        for path in re.findall(r"\bconsistent((?:\.\w+)+)", instead):
            found = consistent
            for part in path[1:].split("."):
                found = getattr(found, part)
        for name in re.findall(r"\bx\.(\w+)", instead):
            assert hasattr(consistent.GlobalTensor, name), name
        for name in re.findall(r"\bmirrored\.(\w+)", instead):
            assert hasattr(mirrored, name), name
        for name in re.findall(r"\.parallelize\(model, placement, (\".*?\")\)|^(\".*\")$", instead):
            assert "".join(name).strip('"') in PLANNERS
