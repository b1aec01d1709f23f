"""Variables are shared by name, and start from values that depend on seed and name only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import consistent.flow as flow
from consistent import S
from tests.ranks import pool

SHAPE = (6, 4)


def values(rank: int, split: bool, first: str | None) -> torch.Tensor:
    flow.clear_default_session()
    if first:
        flow.get_variable(first, SHAPE)
        flow.randn(3, placement=flow.placement.all("cpu"), sbp=S(0))
    distribute = flow.distribute.split(0) if split else flow.distribute.broadcast()
    return flow.get_variable(
        "w", SHAPE, initializer=flow.truncated_normal(0.5), distribute=distribute
    ).full()


def test_initial_values_depend_on_the_name_and_the_seed_only() -> None:
    torch.manual_seed(0)
    expected = values(0, False, None)
    assert expected.abs().max() <= 1 and expected.std() > 0.2
    for ranks, split, first in ((1, True, None), (2, False, "v"), (2, True, None), (3, True, "v")):
        for found in pool(ranks).run(values, split, first):
            assert torch.equal(found, expected)


def test_another_name_or_seed_gives_other_values() -> None:
    flow.clear_default_session()
    torch.manual_seed(0)
    a, b = flow.get_variable("a", SHAPE), flow.get_variable("b", SHAPE)
    c = flow.get_variable("c", SHAPE, random_seed=7)
    assert not torch.equal(a.full(), b.full())
    flow.clear_default_session()
    torch.manual_seed(1)
    assert torch.equal(flow.get_variable("c", SHAPE, random_seed=7).full(), c.full())
    assert not torch.equal(flow.get_variable("a", SHAPE).full(), a.full())


def test_one_name_is_one_variable() -> None:
    flow.clear_default_session()
    w = flow.get_variable("w", SHAPE)
    assert flow.get_variable("w") is w and flow.get_variable("w", SHAPE) is w
    with pytest.raises(
        ValueError,
        match=r"made as torch.float32 \(6, 4\) B, and is asked for as torch.float32 \(2,\) B",
    ):
        flow.get_variable("w", (2,))
    with pytest.raises(ValueError, match="there is no variable 'v', and no shape"):
        flow.get_variable("v")


def test_initializers() -> None:
    flow.clear_default_session()
    made = {
        "zeros": flow.zeros_initializer(),
        "ones": flow.ones_initializer(),
        "three": flow.constant_initializer(3),
        "normal": flow.random_normal_initializer(5, 0.1),
        "uniform": flow.random_uniform_initializer(2, 3),
    }
    found = {
        name: flow.get_variable(name, (50,), initializer=init).full() for name, init in made.items()
    }
    assert (
        (found["zeros"] == 0).all() and (found["ones"] == 1).all() and (found["three"] == 3).all()
    )
    assert abs(found["normal"].mean() - 5) < 0.1
    assert found["uniform"].min() >= 2 and found["uniform"].max() <= 3


# -- files ---------------------------------------------------------------------------------------


def saved(rank: int, folder: str) -> None:
    flow.clear_default_session()
    flow.get_variable("a/w", SHAPE, distribute=flow.distribute.split(0))
    flow.get_variable("b", (3,))
    flow.train.CheckPoint().save(folder)


def loaded(rank: int, folder: str, early: bool) -> Any:
    flow.clear_default_session()
    torch.manual_seed(5)
    if early:
        flow.train.CheckPoint().load(folder)
    w = flow.get_variable("a/w", SHAPE, distribute=flow.distribute.split(1))
    other = w.full().clone()
    if not early:
        flow.get_variable("b", (3,))
        flow.train.CheckPoint().load(folder)
    result = w.full().clone(), other
    flow.train.CheckPoint().init()
    return *result, w.full()


def test_variables_come_back_on_other_devices_also_before_they_are_made(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    pool(2).run(saved, folder)
    flow.clear_default_session()
    torch.manual_seed(0)
    expected = flow.get_variable("a/w", SHAPE).full()
    for early in (False, True):
        for found, before, initial in pool(3).run(loaded, folder, early):
            assert torch.equal(found, expected)
            assert torch.equal(before, expected) is early
            assert not torch.equal(initial, expected)


def refused(rank: int, folder: str, what: str) -> str:
    flow.clear_default_session()
    flow.get_variable("new", (2,))
    try:
        getattr(flow.train.CheckPoint(), what)(folder)
    except OSError as error:
        return str(error)
    return ""


def test_wrong_folders_are_errors_on_every_rank(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    pool(2).run(saved, folder)
    assert all("holds variables already" in text for text in pool(2).run(refused, folder, "save"))
    assert all("the program has 'new' too" in text for text in pool(2).run(refused, folder, "load"))
    assert all(
        "holds no variables" in text
        for text in pool(2).run(refused, str(tmp_path / "none"), "load")
    )
