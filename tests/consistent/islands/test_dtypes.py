"""Islands exchange parameters of any dtype, rounded to any dtype: both parts of complex numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from consistent.islands.meetings import Meetings
from consistent.islands.outer import Outer, _broadcast_tensor
from mirrored.transports.torch_dist.islands import IslandConnection, IslandPosition

PARAMETERS = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip
# The largest rounding error of a number of at most 8, twice.
SENT = {
    None: 0.0, torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-5, torch.int8: 0.13,
    torch.float8_e4m3fn: 1.0, torch.float8_e5m2: 2.0,
}  # fmt: skip


def both(do: Any) -> list[Any]:
    """What ``do`` returns on each of two islands of one rank, which run at the same time."""
    store: Any = HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(
            threads.map(do, [IslandPosition(k, 2, 0, store, timeout_s=60.0) for k in range(2)])
        )


def drawn(dtype: torch.dtype, seed: int, n: int = 300) -> torch.Tensor:
    numbers = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    whole = numbers.round_().to(torch.float32)  # so that no dtype rounds it
    return torch.view_as_complex(whole).to(dtype) if dtype.is_complex else whole[:, 0].to(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("dtype", "sent"), [*product(PARAMETERS, SENT)])
def test_means_have_both_parts_of_a_number(dtype: torch.dtype, sent: torch.dtype | None) -> None:
    def train(between: IslandPosition) -> tuple[torch.Tensor, int]:
        model = nn.Module()
        model.weight = nn.Parameter(drawn(dtype, 7))
        outer = Outer(
            Meetings(between, None, "test"), model, partial(torch.optim.SGD, lr=1.0), 1, 1, sent
        )
        before = outer.sent_bytes
        with torch.no_grad():
            model.weight.add_(drawn(dtype, between.number))
        outer.step()
        return model.weight.detach(), outer.sent_bytes - before

    (first, nbytes), (second, _) = both(train)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    wanted = drawn(wide, 7) + (drawn(wide, 0) + drawn(wide, 1)) / 2
    assert torch.equal(first.to(wide), second.to(wide)) and first.dtype == dtype
    torch.testing.assert_close(first.to(wide), wanted, atol=SENT[sent], rtol=0)
    numbers = 300 if dtype.is_complex else 150  # one of two parts
    size = (sent or torch.empty(0, dtype=dtype).real.dtype).itemsize
    scales = 4 * -(-numbers // 256) if sent in (torch.int8, torch.float8_e4m3fn) else 0
    assert nbytes == 2 * (numbers * size + scales)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype",
    [*PARAMETERS, torch.int64, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int16,
     torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2],
)  # fmt: skip
def test_state_of_an_island_reaches_another_one_in_any_dtype(dtype: torch.dtype) -> None:
    def take(between: IslandPosition) -> torch.Tensor:
        line: IslandConnection = between.connect("line", [0, 1], 60.0)
        return _broadcast_tensor(line, 1, drawn(torch.float32, between.number).abs().to(dtype))

    first, second = both(take)
    wanted = drawn(torch.float32, 1).abs().to(dtype)
    for found in (first, second):
        assert found.dtype == dtype and torch.equal(
            found.view(torch.uint8), wanted.view(torch.uint8)
        )
