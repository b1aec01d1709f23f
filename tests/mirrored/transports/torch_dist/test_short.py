"""Short messages: a few numbers are summed in one, and in that of notes where nobody has one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mirrored.reduction import ordered_reduce
from mirrored.transports.default import current
from mirrored.transports.torch_dist import short
from tests.mirrored.kinds import everywhere, over_gloo, run
from tests.ranks import pool

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int64, torch.bool)
SHAPES = ((), (1,), (2, 3), (8,), (16,), (17,))  # those of more than 64 bytes go another way


def _piece(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


def _sums(rank: int, n: int) -> None:
    transport, told = current(), tuple(range(n))
    for ranks in (told, told[::-1], (rank,)):
        for shape in SHAPES:
            for dtype in DTYPES:
                pieces = [_piece(r, shape, dtype) for r in ranks]
                own = _piece(rank, shape, dtype)
                for op in ("sum", "max", "min"):
                    wanted = ordered_reduce(pieces, op)
                    notes, total = transport.all_reduce_with_notes(own, ranks, told, op)
                    assert notes == [b""] * n and total is not None
                    for found in (total, transport.all_reduce(own, ranks, op)):
                        assert torch.equal(found, wanted), (ranks, shape, dtype, op)
                        assert found.data_ptr() != own.data_ptr()
    assert torch.equal(own, _piece(rank, shape, dtype))


@everywhere
@pytest.mark.parametrize("n", [2, 3])
def test_sums_have_the_bits_of_the_order_of_ranks(where: str, n: int) -> None:
    run(where, _sums, n, n)


def _told(rank: int, n: int, count: int) -> list[bytes]:
    """The last rank has a note, and does not come to the sum of the others."""
    transport, told = current(), tuple(range(n))
    if rank == n - 1:
        notes = transport.gather_notes(b"a note", told)
    else:
        x = torch.ones(count)
        notes, total = transport.all_reduce_with_notes(x, told, told)
        assert total is None
    assert transport.all_reduce(torch.ones(3), told).tolist() == [n] * 3  # ranks are in step
    return notes


@everywhere
@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_with_a_note_is_heard_by_those_that_sum(where: str, n: int, count: int) -> None:
    assert run(where, _told, n, n, count) == [[b""] * (n - 1) + [b"a note"]] * n


def _memory(rank: int) -> int:
    for _ in range(3):
        current().gather_notes(b"", (0, 1))
        current().all_reduce(torch.ones(2), (0, 1))
    return len([ranks for ranks in short._free_buffers if ranks == (0, 1)])


def test_memory_is_used_again() -> None:
    assert pool(2).run(over_gloo, _memory) == [1, 1]
