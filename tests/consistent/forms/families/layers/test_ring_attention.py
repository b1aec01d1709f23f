"""Attention of rows and keys that are cut alike: values and gradients are torch's, and no rank has
all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from mirrored.transports.counting import counting
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, on_ranks, pool

CUTS = ('S(2, cut="zigzag")', "S(2, blocks=2)", "S(2, of=4)")


def operands(rows: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(0)
    counts = (heads * groups, heads, heads)
    return [torch.randn(2, n, rows, 4, dtype=dtype) for n in counts]


def compare(given: list[Any], placement: Any, sbp: Any, seed: Any, **kwargs: Any) -> Any:
    attention: Any = F.scaled_dot_product_attention
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    want = attention(*leaves, **kwargs)
    want.backward(seed)
    laid: list[Any] = [consistent.distribute(x, placement, sbp) for x in given[:3]]
    laid += [
        consistent.distribute(x, placement, [consistent.B] * placement.ndim) for x in given[3:]
    ]
    laid = [x.requires_grad_(x.is_floating_point()) for x in laid]
    found = attention(*laid, **kwargs)
    found.backward(consistent.distribute(seed, placement, sbp))
    torch.testing.assert_close(found.full(), want)
    for x, leaf in zip(laid, leaves, strict=True):
        if leaf.grad is not None:
            torch.testing.assert_close(x.grad.full(), leaf.grad)
    return found


def check(rank: int, n: int, heads: int, groups: int) -> None:
    """Causal or not in turn, so that each layout, each count of rows and of heads has both."""
    line = consistent.placement("cpu", range(n))
    for i, (rows, sbps) in enumerate(((16, CUTS), (13, CUTS[:2]), (3, CUTS[:2]))):
        given = operands(rows, heads, groups)
        seed = torch.randn_like(given[0])
        ragged = f"S(2, sizes={(rows - n + 1, *[1] * (n - 1))})"
        for j, sbp in enumerate((*sbps, ragged)):
            for causal in (True, False) if ALL else ((i + j + n + heads) % 2 == 0,):
                found = compare(
                    given, line, sbp, seed, is_causal=causal, enable_gqa=groups > 1
                )  # fmt: skip
                assert str(found.sbp[0]) == sbp


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (1, 3), (5, 1)])
@on_ranks(2, 3, 4)
def test_values_and_gradients(rank: int, heads: int, groups: int) -> None:
    check(rank, torch.distributed.get_world_size(), heads, groups)


def masks(rows: int) -> list[torch.Tensor]:
    """Of a window, of padding, with rows that see nothing, and one that is learned."""
    place = torch.arange(rows)
    window = (place - place[:, None]).abs() <= 2
    padding = torch.ones(2, 1, 1, rows, dtype=torch.bool)
    padding[0, ..., rows // 2 :] = False
    none = window.clone()
    none[rows // 3] = False
    learned = torch.randn(4, rows, rows, dtype=torch.float64)
    learned[:, :, 1] = -torch.inf
    return [window, padding, none, learned, torch.randn(2, 1, 1, rows, dtype=torch.float64)]


@on_ranks(2, 3, 4)
def test_masks(rank: int) -> None:
    line = consistent.placement("cpu", range(torch.distributed.get_world_size()))
    for rows in (17, 3):
        given = operands(rows, 4, 1)
        for mask in masks(rows):
            compare([*given, mask], line, CUTS[0], torch.randn_like(given[0]))


def dropped(rank: int, n: int, sbp: Any, masked: bool) -> list[torch.Tensor]:
    line = consistent.placement("cpu", range(n))
    given, seed = operands(14, 2, 2), operands(14, 2, 2)[0]
    mask = masks(14)[2] if masked else None
    laid: list[Any] = [consistent.distribute(x, line, sbp).requires_grad_() for x in given]
    torch.manual_seed(5)
    out: Any = F.scaled_dot_product_attention(
        *laid, attn_mask=mask, dropout_p=0.4, is_causal=not masked, enable_gqa=True
    )
    (out * seed).sum().backward()
    return [out.full(), *(x.grad.full() for x in laid)]


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_does_not_depend_on_the_cut(masked: bool) -> None:
    wanted = dropped(0, 1, consistent.B, masked)
    for n in (2, 3, 4):
        for sbp in (*CUTS[:2], "S(2)"):
            for found in pool(n).run(dropped, n, sbp, masked):
                for value, want in zip(found, wanted, strict=True):
                    torch.testing.assert_close(value, want)


@on_ranks(4)
def test_batches_on_another_axis(rank: int) -> None:
    grid = consistent.placement("cpu", [[0, 1], [2, 3]])
    given = operands(9, 4, 1)
    for kwargs in ({"is_causal": True}, {}):
        compare(given, grid, '(S(0), S(2, cut="zigzag"))', torch.randn_like(given[0]), **kwargs)
    window = masks(9)[0].expand(2, 1, 9, 9)
    compare([*given, window], grid, '(S(0), S(2, cut="zigzag"))', torch.randn_like(given[0]))


def sent(rank: int, n: int, sbp: str, mask: bool) -> list[int]:
    """Bytes of a forward, and of a forward and backward, whose mask is a window, or causal."""
    line, rows = consistent.placement("cpu", range(n)), 64 * n
    given = operands(rows, 1, 1)
    place = torch.arange(rows)
    ahead = place - place[:, None]
    window = (ahead <= 0) & (ahead > -3)
    found = []
    for grad in (False, True):
        laid = [consistent.distribute(x, line, sbp).requires_grad_(grad) for x in given]
        attention: Any = F.scaled_dot_product_attention
        with consistent.plain_may_differ(), counting() as log:
            out = attention(*laid, attn_mask=window) if mask else attention(*laid, is_causal=True)
            if grad:
                out.backward(consistent.distribute(given[0], line, sbp))
        found.append(log.bytes)
    return found


def test_a_rank_is_sent_the_keys_that_its_rows_see() -> None:
    size = 2 * 4 * 8  # bytes of one key
    for n in (2, 3):
        told = (n - 1) * 64 * n  # each rank tells the others which keys its rows see
        for forward, both in pool(n).run(sent, n, f"S(2, of={64 * n})", True):
            assert forward <= told + 2 * 2 * size
            assert both <= 2 * told + 3 * 2 * 2 * size
    # Causal rows of the first piece see no keys of the second, which sends nothing there.
    assert [x for x, _ in pool(2).run(sent, 2, "S(2, of=128)", False)] == [2 * 64 * size, 0]


@on_ranks(2, 3)
def test_keys_travel_as_messages(rank: int) -> None:
    n = torch.distributed.get_world_size()
    over_gloo(rank, lambda rank: check(rank, n, 5, 1))


@on_ranks(2)
def test_long_rows_go_round_without_a_cut(rank: int) -> None:
    line = consistent.placement("cpu", range(2))
    given = [torch.randn(1, 1, 2048, 4) for _ in range(3)]
    for kwargs in ({"is_causal": True}, {}):
        compare(given, line, "S(2)", torch.ones_like(given[0]), **kwargs)
