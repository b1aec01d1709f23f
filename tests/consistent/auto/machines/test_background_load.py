"""Other processes that make a call at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from consistent.auto.machines import work_of
from consistent.auto.machines.background_load import BackgroundLoad
from consistent.auto.machines.op_signature import OpSignature, Unknown

x = torch.empty(8, 8, device="meta")
ADD: OpSignature = work_of(torch.ops.aten.add.Tensor, (x, x), {}, x).key  # type: ignore[assignment]


@pytest.fixture(scope="module")
def company() -> Iterator[BackgroundLoad]:
    """Two others, which take two seconds to start."""
    made = BackgroundLoad(2)
    yield made
    made.end()


def test_others_make_the_call_and_may_be_asked_again(company: BackgroundLoad) -> None:
    for cold in (False, True):
        with company.while_making(ADD, cold) as begun:
            assert begun == 2


def test_others_that_cannot_make_it_are_there_for_the_next_one(company: BackgroundLoad) -> None:
    with company.while_making(ADD._replace(args=(Unknown("Generator"),)), False) as begun:
        assert begun == 0
    with company.while_making(ADD, False) as begun:
        assert begun == 2


def test_nobody_is_needed() -> None:
    with BackgroundLoad(0).while_making(ADD, False) as begun:
        assert begun == 0


def test_others_that_ended_are_started_again(company: BackgroundLoad) -> None:
    with company.while_making(ADD, False) as begun:
        assert begun == 2
    company.end()
    with company.while_making(ADD, False) as begun:
        assert begun == 2
