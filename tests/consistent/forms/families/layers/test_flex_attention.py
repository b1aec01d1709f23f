"""``flex_attention`` of global tensors: the functions see logical places, and values and gradients
are those of plain torch, of the query, the keys, the values, and what the functions read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)

import consistent
from consistent import B, S
from consistent.torch_patches import compiling
from mirrored.transports.counting import counting
from tests.ranks import ALL, on_ranks, pool

ROWS, HEADS = 21, 4
attention: Any = flex_attention
LAYOUTS = (S(0), S(1), S(2), S(2, cut="zigzag"), S(2, blocks=2), B)


def layouts(n: int) -> list[Any]:
    """Those to compare on ``n`` ranks; 4 heads do not divide by 3."""
    every = [sbp for sbp in LAYOUTS if n != 3 or sbp != S(1)]
    return every if ALL or n == 2 else [S(0), S(2, cut="zigzag")]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k <= 5


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) | (k < 4 + b)


def document(ids: Any) -> Callable:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def soft_cap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 3 * torch.tanh(s / 3)


def alibi(slopes: Any) -> Callable:
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


def relative(table: Any) -> Callable:
    return lambda s, b, h, q, k: s + table[h, q - k + ROWS]


def nested(table: Any) -> Callable:
    return lambda s, b, h, q, k: s * table[q - k + ROWS][h] + b


def block_mask(mask_mod: Callable, n: int = ROWS) -> Any:
    return create_block_mask(mask_mod, 4, None, n, n, device="cpu", BLOCK_SIZE=4)


def plain(given: list[Tensor], score_mod: Any, mask_mod: Any) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp), place by place as torch's functions are defined."""
    q, k, v = given
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    at = [torch.arange(n) for n in (*scores.shape,)]
    at = [x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(at)]
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*at), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def operands(groups: int, rows: int = ROWS) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, n, rows, 4, dtype=torch.float64)
            for n in (HEADS * groups, HEADS, HEADS)]  # fmt: skip


def compare(
    placement: Any,
    sbp: Any,
    score_mod: Callable | None,
    mask_mod: Callable | None,
    learned: Any = None,
    groups: int = 1,
) -> None:
    """``learned``: a tensor that ``score_mod(tensor)`` reads; it is plain, and global."""
    given = operands(groups)
    leaves = [x.clone().requires_grad_() for x in given]
    tables = [] if learned is None else [learned.clone().requires_grad_()]
    made = score_mod(*tables) if tables and score_mod else score_mod
    want, log = plain(leaves, made, mask_mod)
    seed, of_log = torch.randn_like(want), torch.randn_like(log)
    (want * seed).sum().backward(retain_graph=True)
    (log * of_log).sum().backward()
    for kind in (None,) if learned is None else ("plain", "B", "S"):
        laid = [consistent.distribute(x, placement, sbp).requires_grad_() for x in given]
        ours = [] if kind is None else [_laid(learned, kind, placement)]
        made = score_mod(*ours) if ours and score_mod else score_mod
        mask = None if mask_mod is None else block_mask(mask_mod)
        found, aux = attention(
            *laid, made, mask, enable_gqa=groups > 1, return_aux=AuxRequest(lse=True)
        )
        assert found.sbp == (sbp,)
        (found * seed).sum().backward(retain_graph=True)
        (aux.lse * of_log).sum().backward()
        pairs = [(found, want), (aux.lse, log)]
        pairs += [(x.grad, leaf.grad) for x, leaf in zip(laid + ours, leaves + tables, strict=True)]
        for x, y in pairs:
            torch.testing.assert_close(x.full() if hasattr(x, "full") else x, y)


def _laid(table: Any, kind: str, placement: Any) -> Any:
    if kind == "plain":
        return table.clone().requires_grad_()
    return consistent.distribute(table, placement, S(0) if kind == "S" else B).requires_grad_()


@pytest.mark.parametrize("sbp", [B, S(0)])
@on_ranks(2)
def test_a_mask_is_made_of_what_global_tensors_hold(rank: int, sbp: Any) -> None:
    ids = torch.arange(ROWS) // 8
    laid = consistent.distribute(ids, consistent.Placement.all("cpu"), sbp)
    for mask_mod in (document, lambda x: lambda b, h, q, k: x[q] == x[k]):
        found, want = block_mask(mask_mod(laid)), block_mask(mask_mod(ids))
        assert found.kv_num_blocks.equal(want.kv_num_blocks)
        assert found.to_dense().equal(want.to_dense())
    assert create_mask(document(laid), 1, 1, ROWS, ROWS, "cpu").equal(
        create_mask(document(ids), 1, 1, ROWS, ROWS, "cpu")
    )
    compare(laid.placement, S(2), None, document(laid))


@on_ranks(2, 3, 4)
def test_masks(rank: int) -> None:
    line = consistent.placement("cpu", range(torch.distributed.get_world_size()))
    ids = torch.arange(ROWS) // 8
    for mask in (causal, and_masks(causal, window), prefix, document(ids), None):
        for sbp in layouts(line.size):
            compare(line, sbp, None, mask)


@on_ranks(2, 3, 4)
def test_scores(rank: int) -> None:
    line = consistent.placement("cpu", range(torch.distributed.get_world_size()))
    table = torch.randn(HEADS, 2 * ROWS, dtype=torch.float64)
    for sbp in layouts(line.size):
        compare(line, sbp, soft_cap, causal)
        compare(line, sbp, alibi, causal, torch.randn(HEADS, dtype=torch.float64))
        compare(line, sbp, relative, None, table)


@on_ranks(2)
def test_groups_of_heads(rank: int) -> None:
    line = consistent.placement("cpu", range(2))
    for sbp in (S(1), S(2, cut="zigzag")):
        compare(line, sbp, soft_cap, causal, groups=2)


@on_ranks(2)
def test_functions_are_called_place_by_place(rank: int) -> None:
    line = consistent.placement("cpu", range(2))
    table, given = torch.randn(2 * ROWS, HEADS, dtype=torch.float64), operands(1)
    at = torch.arange(ROWS)
    factors = table[at[:, None] - at + ROWS].permute(2, 0, 1)
    want = plain(given, lambda s, b, h, q, k: s * factors + b, None)
    laid = [consistent.distribute(x, line, S(2)) for x in given]
    torch.testing.assert_close(attention(*laid, nested(table)).full(), want[0])


def sent(rank: int, n: int, documents: bool) -> int:
    given = operands(1, 16 * n)
    mask_mod = document(torch.arange(16 * n) // 16) if documents else and_masks(causal, window)
    line = consistent.placement("cpu", range(n))
    laid = [consistent.distribute(x, line, S(2)).requires_grad_() for x in given]
    mask = block_mask(mask_mod, 16 * n)
    with consistent.plain_may_differ(), counting() as log:
        attention(*laid, None, mask).sum().backward()
    return log.bytes


def test_keys_that_no_row_sees_are_not_sent() -> None:
    block = 4 * HEADS * 4 * 2 * 4 * 8  # bytes of keys and values of a block, in all batches
    for n in (2, 3):
        assert max(pool(n).run(sent, n, True)) == 0
        # Two blocks go to the next rank, and their gradients come back.
        assert max(pool(n).run(sent, n, False)) <= 2 * 2 * block


@on_ranks(2)
def test_what_is_wrong_is_said_on_all_ranks(rank: int) -> None:
    line = consistent.placement("cpu", range(2))
    laid = [consistent.distribute(x, line, S(2)) for x in operands(1)]
    with pytest.raises(ValueError, match="made for 7 rows and 7 keys, and there are 21"):
        attention(*laid, block_mask=block_mask(causal, 7))
    with pytest.raises(ValueError, match="the query has 4 heads and the keys have 2"):
        attention(laid[0], laid[1][:, :2], laid[2][:, :2])
    other = consistent.distribute(torch.ones(4), consistent.placement("cpu", [1, 0]), B)
    with pytest.raises(RuntimeError, match="reads f32.4. B on .* and the query is on"):
        attention(*laid, alibi(other))


@on_ranks(2)
def test_a_compiled_call_is_the_same(rank: int) -> None:
    line = consistent.placement("cpu", range(2))
    laid = [consistent.distribute(x, line, S(2)) for x in operands(1)]
    torch._dynamo.reset()  # which keeps what it skips
    compiling._warned = False  # it is said once
    with pytest.warns(UserWarning, match="code that meets global tensors runs as it is written"):
        found = torch.compile(attention)(*laid, soft_cap)
    torch.testing.assert_close(found.full(), plain(operands(1), soft_cap, None)[0])


def test_plain_tensors_are_torchs_own() -> None:
    consistent.zeros(1, placement=consistent.placement("cpu", [0]), sbp=B)
    given = [x.float() for x in operands(1)]
    compiled: Any = torch.compile(attention, fullgraph=True, backend="eager")
    for call in (attention, compiled):
        found = call(*given, soft_cap, block_mask(causal))
        torch.testing.assert_close(found, plain(given, soft_cap, causal)[0])
