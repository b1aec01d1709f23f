"""Every dtype of torch in every move: the bits of simulated ranks, or an error before anything is
sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mirrored import current
from tests.mirrored.kinds import run
from tests.mirrored.transports.moves import bits
from tests.ranks import ALL

# They cannot be made of bytes. Refused like those of less than a byte.
QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {x for x in vars(torch).values() if isinstance(x, torch.dtype)} - QUANTISED, key=str
)
LARGE = 300_000  # bytes of what gloo's own all-reduce reduces, on three ranks
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits where every bit pattern is a number, else random numbers."""
    g = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * 9
        return x.to(torch.float32).to(dtype)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=g).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(256, (*shape[:-1], shape[-1] * size), generator=g, dtype=torch.uint8)
    return raw.view(dtype)


def moves(rank: int, n: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    ranks, t = tuple(range(n)), current()
    rows = [k + 1 for k in range(n)]
    whole = functools.partial(values, rank, (sum(rows), 4), dtype)
    own = functools.partial(values, rank, (rows[rank], 4), dtype)
    turned = functools.partial(values, rank, (4, rows[rank]), dtype)
    made = functools.cache(lambda: values(rank, (3, LARGE // 3 // dtype.itemsize), dtype))

    def large() -> Tensor:
        return made().clone()

    found: dict[str, Callable[[], Any]] = {
        "all_gather_into_tensor": lambda: t.all_gather_into_tensor(own(), 0, rows, ranks),
        "join inner": lambda: t.all_gather_into_tensor(turned(), 1, rows, ranks),
        "join several": lambda: t.all_gather_several([own(), own()], [0, 0], [rows, rows], ranks),
        "all_to_all_single": lambda: t.all_to_all_single(own(), 1, _columns(n), 0, rows, ranks),
        "broadcast": lambda: t.broadcast(whole(), whole().shape, dtype, "cpu", n - 1, ranks),
        "exchange": lambda: t.exchange(
            [((rank + 1) % n, own())], [((rank - 1) % n, (rows[rank - 1], 4), dtype)], ranks
        ),
        "send": lambda: _around(rank, n, own(), (rows[rank - 1], 4)),
        "peers": lambda: _peers(whole(), ranks),
    }
    for op in ("sum", "max", "min"):
        found |= {
            f"{op} of small": lambda op=op: t.all_reduce(whole(), ranks, op),
            f"{op} of large": lambda op=op: t.all_reduce(large(), ranks, op),
            f"{op} begun": lambda op=op: t.all_reduce_async(large(), ranks, op).wait(),
            f"{op} cut": lambda op=op: t.reduce_scatter(whole(), 0, rows, ranks, op),
            f"{op} cut several": lambda op=op: t.reduce_scatter_several(
                [whole(), whole()], [0, 0], [rows, rows], ranks, op
            ),
        }
    return found


def _columns(n: int) -> list[int]:
    return [4 - n + 1, *[1] * (n - 1)]


def _around(rank: int, n: int, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    sent = current().send(x, (rank + 1) % n, "around")
    got = current().receive(shape, x.dtype, (rank - 1) % n, "around", "cpu").wait()
    sent.wait()
    return got


def _peers(x: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
    with current().peers(x, ranks) as views:
        return [view.clone() for view in views]


def outcomes(rank: int, n: int, names: list[str]) -> dict[str, Any]:
    """The bits that each move of each dtype gave, or its error's type; after each, a sum."""
    found: dict[str, Any] = {}
    for name in names:
        dtype = getattr(torch, name)
        for move, call in moves(rank, n, dtype).items():
            try:
                given = call()
            except Exception as error:  # noqa: BLE001 - compared
                found[f"{name} {move}"] = f"{type(error).__name__}: {error}"
            else:
                given = given if isinstance(given, list) else [given]
                found[f"{name} {move}"] = [_bits(x) for x in given]
            assert current().all_reduce(torch.ones(3), tuple(range(n))).tolist() == [n] * 3
    return found


def _bits(x: Tensor) -> bytes:
    known = x.dtype.is_floating_point and x.dtype.itemsize > 1
    return bits(x) if known else x.contiguous().view(torch.uint8).numpy().tobytes()


# Gloo adds wide floats in an order of its own, the same on all ranks.
IN_ANOTHER_ORDER = {
    f"{name} sum {how}"
    for name in ("float32", "float64", "complex64", "complex128")
    for how in ("of large", "begun")
}


@functools.cache
def simulated(n: int) -> dict[str, list[Any]]:
    return _by_call(run("simulated", outcomes, n, n, NAMES))


def _by_call(found: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {call: [each[call] for each in found] for call in found[0]}


@pytest.mark.parametrize("n", [2, 3] if ALL else [3])
@pytest.mark.parametrize("where", ["gloo", "shared memory"])
def test_a_move_gives_the_bits_of_simulated_ranks_or_the_same_error(where: str, n: int) -> None:
    got, wanted = _by_call(run(where, outcomes, n, n, NAMES)), simulated(n)
    assert len(got) == len(NAMES) * 23 > 800
    for call, found in got.items():
        if where == "gloo" and call in IN_ANOTHER_ORDER:
            assert len({str(each) for each in found}) == 1, call
        elif any(isinstance(each, list) for each in wanted[call]):
            assert found == wanted[call], call
        else:  # shared memory moves bytes that torch cannot copy
            assert len({isinstance(each, list) for each in found}) == 1, call
