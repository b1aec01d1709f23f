"""``torch.nn.attention.varlen`` of global tensors: values and gradients are those of each document
alone, and a document in one piece sends nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import consistent
from consistent import B, Placement, S
from mirrored.transports.counting import counting
from tests.ranks import on_ranks, pool

ZIGZAG = S(0, cut="zigzag")
attention: Any = varlen_attn
# Heads of queries for each of keys: torch 2.11 knows one alone.
GROUPS = 2 if "enable_gqa" in inspect.signature(varlen_attn).parameters else 1


def operands(rows: int, keys: int, heads: int, groups: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(rows, heads * groups, 4), (keys, heads, 4), (keys, heads, 4)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def starts(lengths: Sequence[int]) -> Tensor:
    """``cu_seq`` of documents of these lengths."""
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def plain(given: list[Tensor], rows: Tensor, keys: Tensor, window: tuple[int, int]) -> Any:
    """(result, log-sum-exp) by one matrix of scores, with places counted from a document's end."""
    q, k, v = (x.transpose(0, 1) for x in given)
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    sees = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    for (a, b), (c, d) in zip(zip(rows, rows[1:]), zip(keys, keys[1:]), strict=True):
        ahead = torch.arange(int(d - c)) - torch.arange(int(b - a))[:, None] - ((d - c) - (b - a))
        left, right = (10**6 if n < 0 else n for n in window)
        sees[a:b, c:d] = (ahead >= -left) & (ahead <= right)
    scores = (q @ k.mT / 2).masked_fill(~sees, -torch.inf)
    chances = scores.softmax(-1).nan_to_num(0.0)
    return (chances @ v).transpose(0, 1), scores.logsumexp(-1)


def compare(
    placement: Placement, sbp: Any, given: list[Tensor], lengths: Any, window: tuple[int, int]
) -> Any:
    rows, keys = (starts(x) for x in lengths)
    leaves = [x.clone().requires_grad_() for x in given]
    want, logs = plain(leaves, rows, keys, window)
    seed = torch.randn_like(want)
    want.backward(seed)
    laid = [consistent.distribute(x, placement, sbp).requires_grad_() for x in given]
    grouped = {"enable_gqa": True} if given[0].shape[1] != given[1].shape[1] else {}
    found, found_logs = attention(
        *laid, rows, keys, max(lengths[0]), max(lengths[1]), window_size=window,
        return_aux=AuxRequest(lse=True), **grouped,
    )  # fmt: skip
    found.backward(consistent.distribute(seed, placement, sbp))
    torch.testing.assert_close(found.full(), want)
    torch.testing.assert_close(found_logs.full(), logs.float())
    for x, leaf in zip(laid, leaves, strict=True):
        torch.testing.assert_close(x.grad.full(), leaf.grad)
    return found


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)], ids=str)
@on_ranks(2, 3, 4)
def test_documents_of_split_tokens(rank: int, window: tuple[int, int]) -> None:
    line = consistent.placement("cpu", range(torch.distributed.get_world_size()))
    for lengths in ((5, 0, 9, 3), (17,), (1, 2, 3, 4, 3, 2, 1)):
        given = operands(sum(lengths) + 1, sum(lengths) + 1, 2, GROUPS)  # one token in no document
        for sbp in (ZIGZAG, S(0), S(0, blocks=2)):
            found = compare(line, sbp, given, (lengths, lengths), window)
            assert found.sbp == (sbp,)


@on_ranks(2, 3)
def test_heads_and_whole_tensors(rank: int) -> None:
    line = consistent.placement("cpu", range(torch.distributed.get_world_size()))
    given = operands(9, 12, 6, 1)
    for sbp in (S(1), B):
        found = compare(line, sbp, given, ((4, 5), (6, 6)), (-1, 0))
        assert found.sbp == (sbp,)


def sent(rank: int, n: int, lengths: Sequence[int], window: tuple[int, int]) -> int:
    given = operands(sum(lengths), sum(lengths), 1, 1)
    line = consistent.placement("cpu", range(n))
    laid = [consistent.distribute(x, line, S(0)).requires_grad_() for x in given]
    where = [starts(lengths)] * 2
    with consistent.plain_may_differ(), counting() as log:
        attention(*laid, *where, max(lengths), max(lengths), window_size=window).sum().backward()
    return log.bytes


def test_a_document_in_one_piece_sends_nothing() -> None:
    key = 2 * 4 * 8  # bytes of a key and its value
    for n in (2, 3):
        loss = max(pool(n).run(sent, n, (1,) * n, (0, 0)))  # what the sum itself sends
        assert max(pool(n).run(sent, n, (4, 2) * n, (-1, -1))) == loss
        # Three keys go to the next rank, again in backward, and their gradients come back.
        assert max(pool(n).run(sent, n, (64 * n,), (3, 0))) <= loss + 3 * 3 * key
        assert max(pool(n).run(sent, n, (6 * n - 1, 1), (-1, -1))) > loss


@on_ranks(2)
def test_documents_that_are_not_in_order_are_refused(rank: int) -> None:
    line = consistent.placement("cpu", range(2))
    laid = [consistent.distribute(x, line, S(0)) for x in operands(6, 6, 1, 1)]
    for wrong in ([0, 4, 2], [0, 7], [-1, 3]):
        where = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="cumulative lengths of the documents"):
            attention(*laid, where, where, 6, 6)
