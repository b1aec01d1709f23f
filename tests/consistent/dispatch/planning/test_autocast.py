"""Under autocast every op of torch's lists gives what plain torch gives, in the same dtype."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, Placement
from consistent.dispatch.planning import autocast
from consistent.movement.world import my_coordinate
from consistent.spec import Sbp
from tests.brute_force import Example
from tests.consistent.rules.layouts import (
    FAMILIES,
    Layout,
    changed,
    examples,
    layouts,
    name_of,
    run,
    tensors_of,
    wanted,
)
from tests.ranks import ALL, on_ranks, simulate
from tests.twins import GRIDS, Laid, randn

EVERY = 3 if ALL else 14  # of each example's layouts every so many is run
HALVES = (torch.bfloat16, torch.float16)
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def _cast(dtype: torch.dtype) -> Any:
    return lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _mixed(dtype: torch.dtype) -> Any:
    """Every second floating tensor stays in float32."""
    seen = iter(range(1000))

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x.to(torch.float32 if next(seen) % 2 else dtype)

    return one


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for item in value for x in _leaves(item)] if isinstance(value, tuple | list) else []


def _is_listed(case: Example) -> bool:
    name = name_of(case)
    return name in autocast.autocast_ops("cpu") | autocast.autocast_ops("cuda") | set(
        autocast.DECIDING_OP
    )


class _Exactly(Laid):
    """Halves are split into addends whose sum needs no rounding, which a reciprocal would show."""

    def __call__(self, x: torch.Tensor, entry: Sbp = B, other: Sbp = B) -> Any:
        if self.placement is None or entry is not P or x.dtype not in HALVES:
            return super().__call__(x, entry, other)
        first, second = torch.where(x.isfinite(), 2 * x, x), torch.where(x.isfinite(), -x, 0)
        local = second if my_coordinate(self.placement) == (1,) else first
        return consistent.from_local(local, self.placement, P, shape=x.shape)


@functools.cache  # the ranks share them
def _calls(family: str, half: torch.dtype) -> list[tuple[Example, Any, list[Layout]]]:
    """(call, what torch gives, layouts of its operands)."""
    found = []
    for k, case in enumerate(filter(_is_listed, examples(family))):
        for make in (_cast(torch.float32), _cast(half), _mixed(half)):
            given = changed(case, make)
            some = list(layouts(given))[k % EVERY :: EVERY]
            with torch.autocast("cpu", half):
                want = wanted(given) if some else None
            if want is not None:
                found.append((given, want, some))
    return found


def _check(rank: int, ranks: Any, family: str, half: torch.dtype) -> list[str]:
    placement, wrong = Placement("cpu", ranks), []
    for given, want, some in _calls(family, half):
        for layout in some:
            try:
                with torch.autocast("cpu", half):
                    found = run(given, _Exactly(placement), layout)
                _compare(found, want, given, half)
            except Exception as error:  # noqa: BLE001  (all are listed together)
                wrong.append(f"{given} {layout}: {type(error).__name__} {str(error)[:300]}")
    return wrong


def _compare(found: Any, want: Any, given: Example, half: torch.dtype) -> None:
    """Equal dtypes, and values that differ by some roundings of the dtype that was computed in, of
    the largest number met: addends are rounded too."""
    inputs = [x for x in tensors_of(given) if x.is_floating_point() and x.numel()]
    for x, y in zip(_leaves(found), _leaves(want), strict=True):
        assert x.dtype == y.dtype, f"{x.dtype}, not {y.dtype}"
        full = x.full() if isinstance(x, consistent.GlobalTensor) else x
        assert full.dtype == y.dtype, f"the shard is {full.dtype}, not {y.dtype}"
        dtypes = {t.dtype for t in (*tensors_of(given), y)} | {half}
        rounding = max(_ROUNDING.get(dtype, 0.0) for dtype in dtypes)
        if y.numel() and (y.is_floating_point() or y.is_complex()):
            largest = max(x.abs().nan_to_num(0, 0, 0).max().item() for x in (*inputs, y))
            atol = 16 * rounding * largest + 1e-6
            torch.testing.assert_close(full, y, rtol=0, atol=atol, equal_nan=True)


@on_ranks(2)
def test_addends_are_added_before_they_are_rounded(rank: int) -> None:
    """Those here are ten thousand times as large as their sum."""
    p, x, w = Placement("cpu", [0, 1]), randn(4, 4).float(), randn(4, 4, seed=1).float()
    large = torch.full((4, 4), 1e4)
    for op in (torch.matmul, torch.nn.functional.linear, lambda x, w: torch.einsum("ij,jk", x, w)):
        addends = consistent.from_local((x + large, -large)[rank], p, P, shape=x.shape)
        with torch.autocast("cpu", torch.bfloat16):
            found, want = op(addends, w), op(x, w)
        assert found.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(found.full(), want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("half", HALVES if ALL else HALVES[:1], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_dtypes_and_values_under_autocast(family: str, half: torch.dtype) -> None:
    _calls(family, half)
    for wrong in simulate(_check, 2, GRIDS[2], family, half):
        assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])
