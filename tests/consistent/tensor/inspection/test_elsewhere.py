"""Names that other libraries have: an AttributeError says what to call instead."""

from __future__ import annotations

import re

import pytest
import torch

import consistent
from consistent import S
from consistent.spec.elsewhere import OF_PACKAGE, OF_TENSORS

HERE = consistent.placement("cpu", [0])


def tensor() -> consistent.GlobalTensor:
    return consistent.zeros(2, placement=HERE, sbp=S(0))


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_tensor_hints_at_the_name_here(name: str) -> None:
    whose, instead = OF_TENSORS[name]
    for asked in (tensor(), consistent.GlobalTensor):
        with pytest.raises(AttributeError, match=re.escape(instead)) as error:
            getattr(asked, name)
        assert whose in str(error.value)
    assert not hasattr(tensor(), name) and not hasattr(torch.Tensor, name)


@pytest.mark.parametrize("name", OF_PACKAGE)
def test_the_package_hints_at_the_name_here(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(OF_PACKAGE[name][1])):
        getattr(consistent, name)
    assert not hasattr(consistent, name)


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
    for _, instead in [*OF_TENSORS.values(), *OF_PACKAGE.values()]:
        for path in re.findall(r"\bconsistent((?:\.\w+)+)", instead):
            found = consistent
            for part in path[1:].split("."):
                found = getattr(found, part)
        for name in re.findall(r"\bx\.(\w+)", instead):
            assert hasattr(consistent.GlobalTensor, name), name
