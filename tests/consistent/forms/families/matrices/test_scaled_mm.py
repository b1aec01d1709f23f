"""Scaled products of float8 matrices in every layout, and how pieces lie that the kernel gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from consistent.forms.families.matrices.scaled_mm import scaled_mm
from consistent.forms.registry import FORMS, Shards
from mirrored.transports.counting import counting
from tests.ranks import ON_ONE_AXIS, simulate
from tests.torch_release import IS_2_13
from tests.twins import randn

ROWS, INNER, COLUMNS = 6, 32, 96
SCALES = {"one": ((), ()), "rows and columns": ((ROWS, 1), (1, COLUMNS))}
if not IS_2_13:
    del SCALES["rows and columns"]


def _as_kernels_take_them(shard: Shards) -> torch.Tensor:
    """The form, and what a kernel of GPUs would get."""

    def run(x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        assert x.stride(1) == 1 and w.stride(0) == 1, (x.stride(), w.stride())
        return shard.run(x, w, *args, **kwargs)

    return scaled_mm(replace(shard, run=run))


def _operands(scales: str) -> list[torch.Tensor]:
    shapes = SCALES[scales]
    x, w = randn(ROWS, INNER), randn(COLUMNS, INNER, seed=1)
    made = [t.float().to(torch.float8_e4m3fn) for t in (x, w)]
    return [made[0], made[1].t(), *(torch.rand(s) + 0.5 for s in shapes)]


@pytest.mark.parametrize("world", ON_ONE_AXIS)
@pytest.mark.parametrize("scales", SCALES)
def test_every_layout_gives_the_product_and_splits_of_rows_or_columns_send_nothing(
    scales: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMS, "scaled_mm", _as_kernels_take_them)
    given = _operands(scales)
    want = torch._scaled_mm(*given, out_dtype=torch.float32)
    free = {
        (S(0), B): S(0),
        (B, S(1)): S(1),
        (B, B): B,
    }  # layouts of x and w -> that of the product

    def main(rank: int) -> None:
        p = consistent.placement("cpu", list(range(world)))
        by_row, by_column = (s.numel() > 1 for s in given[2:])
        for x in (B, S(0), S(1)):
            for w in (B, S(0), S(1)):
                of_rows = S(0) if by_row and x == S(0) else B
                of_columns = S(1) if by_column and w == S(1) else B
                sbps = (x, w, of_rows, of_columns)
                laid = [consistent.distribute(t, p, s) for t, s in zip(given, sbps, strict=True)]
                rows = {B: B, S(0): S(1), S(1): S(0)}[w]
                laid[1] = consistent.distribute(given[1].t(), p, rows).t()  # as of a weight
                with counting() as sent:
                    made: Any = torch._scaled_mm(*laid, out_dtype=torch.float32)
                if (x, w) in free:
                    assert made.sbp == (free[x, w],) and not sent.calls, (x, w)
                torch.testing.assert_close(made.full(), want)

    simulate(main, world)


def test_more_ranks_than_rows() -> None:
    given = _operands("one")
    given[0] = given[0][:2]
    want = torch._scaled_mm(*given, out_dtype=torch.bfloat16)

    def main(rank: int) -> None:
        p = consistent.placement("cpu", [0, 1, 2])
        laid = [consistent.distribute(given[0], p, S(0)), *given[1:]]
        made: Any = torch._scaled_mm(*laid, out_dtype=torch.bfloat16)
        assert torch.equal(made.full(), want)

    simulate(main, 3)
