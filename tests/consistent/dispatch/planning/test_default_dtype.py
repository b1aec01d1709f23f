"""A plan is found again only under the default dtype that it was made under: torch makes floats of
that dtype out of integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from consistent import GlobalTensor, Placement
from tests.brute_force import Example
from tests.consistent.rules.layouts import FAMILIES, changed, examples, layouts, run, wanted
from tests.ranks import ALL, pool
from tests.twins import GRIDS, Laid

EVERY = 1 if ALL else 4  # of each example's layouts every so many is run


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _integers(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.nan_to_num(0, 0, 0).clamp(-8, 8).round().long()


def _dtypes(value: Any) -> list[torch.dtype]:
    if isinstance(value, GlobalTensor):
        assert value.full().dtype == value.dtype, "the shard has another dtype"
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    return [d for item in value for d in _dtypes(item)] if isinstance(value, tuple | list) else []


def _follows(case: Example) -> bool:
    """Whether torch's results have the default dtype."""
    dtypes = []
    for dtype in (torch.float32, torch.float64):
        with _default(dtype):
            dtypes.append(_dtypes(wanted(case)))
    return dtypes[0] != dtypes[1]


def _check(rank: int, ranks: Any, family: str) -> tuple[int, list[str]]:
    placement, wrong, checked = Placement("cpu", ranks), [], 0
    for k, case in enumerate(examples(family)):
        given = changed(case, _integers)
        if not _follows(given):
            continue
        for layout in list(layouts(given))[k % EVERY :: EVERY]:
            for dtype in (torch.float32, torch.float64):
                with _default(dtype):
                    want = _dtypes(wanted(given))
                    found = _dtypes(run(given, Laid(placement), layout))
                checked += 1
                if found != want:
                    wrong.append(f"{given} {layout} under {dtype}: {found}, not {want}")
    return checked, wrong


@pytest.mark.filterwarnings("ignore")
def test_integers_become_floats_of_the_default_dtype_of_the_moment() -> None:
    checked = 0
    for family in FAMILIES:
        for count, wrong in pool(2).run(_check, GRIDS[2], family, timeout=200.0):
            assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])
            checked += count
    assert checked > 100
