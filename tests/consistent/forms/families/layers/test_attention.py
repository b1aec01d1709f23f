"""Attention on global tensors: dropout by logical index, and torch's modules unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, P, Placement, S
from mirrored.transports.counting import counting
from tests.ranks import ON_ONE_AXIS, pool


def _placement(n: int) -> Placement:
    return Placement("cpu", range(n))


def _given(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def _dropped(rank: int, n: int) -> list[torch.Tensor]:
    found = []
    # Many keys for few rows: which of both moves is a matter of cost.
    for ins, outs in (
        ((B, B, B), (B,)), ((S(0),) * 3, (S(0),)), ((S(1),) * 3, (S(1),)),
        ((S(2), B, B), (S(2),)), ((S(2),) * 3, (S(2), P)), ((B, S(2), S(2)), (P,)),
    ):  # fmt: skip
        torch.manual_seed(3)
        tensors = _given((3, 5, 7, 4), (3, 5, 60, 4), (3, 5, 60, 2))
        q, k, v = (
            consistent.distribute(t, _placement(n), sbp).requires_grad_()
            for t, sbp in zip(tensors, ins, strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        (y * y).sum().backward()
        assert y.sbp[0] in outs
        found += [y.full(), q.grad.full(), k.grad.full(), v.grad.full()]
    return found


def test_attention_dropout_does_not_depend_on_layout_or_ranks() -> None:
    alone = _dropped(0, 1)[:4]
    for n in (2, 3):
        for found in pool(n).run(_dropped, n):
            for i, value in enumerate(found):
                torch.testing.assert_close(value, alone[i % 4])


def test_attention_drops_probabilities_at_its_rate_and_scales_the_rest() -> None:
    torch.manual_seed(0)
    one = _placement(1)
    q, k = (consistent.zeros(1, 40, 50, 4, placement=one, sbp=B) for _ in range(2))
    v = consistent.ones(1, 40, 50, 1, placement=one, sbp=B)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).full()
    assert abs(y.mean().item() - 1) < 6 * math.sqrt(0.25 / 50 / 2000)
    assert abs(y.var().item() - 0.25 / 50) < 0.001


def _sequence_split(rank: int, n: int, causal: bool) -> list:
    """Everything split along the sequence, and a query that is whole on split keys."""
    q, k, v = _given((2, 6, 7, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    found = []
    for query, sbp in ((q, S(2)), (q[:, :, :1], B)):
        given = [t.clone().requires_grad_() for t in (query, k, v)]
        xs = [
            consistent.distribute(t, _placement(n), entry).requires_grad_()
            for t, entry in zip((query, k, v), (sbp, S(2), S(2)), strict=True)
        ]
        want = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
        with counting() as log:
            y = F.scaled_dot_product_attention(*xs, is_causal=causal, enable_gqa=True)
        want.square().sum().backward()
        (y * y).sum().backward()
        pairs = [(y.full().detach(), want.detach())]
        pairs += [(x.grad.full(), t.grad) for x, t in zip(xs, given, strict=True)]
        found.append((str(y.sbp), [x.grad.sbp for x in xs], pairs, log.bytes, k.nbytes + v.nbytes))
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_a_split_sequence_sends_keys_and_values_alone(n: int, causal: bool) -> None:
    for rows, short in pool(n).run(_sequence_split, n, causal):
        for pairs in (rows[2], short[2]):
            for found, want in pairs:
                torch.testing.assert_close(found, want)
        assert rows[:2] == ("(S(2),)", [(S(2),)] * 3) and short[0] == "(P,)"
        # Uneven pieces: the largest, to all others.
        assert rows[3] <= rows[4] * -(-7 // n) / 7 * (n - 1)
        assert short[3] <= 2 * 2 * 2 * 6 * 8


def _modules(rank: int, n: int, batch_first: bool, need_weights: bool) -> list:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(12, 6, batch_first=batch_first, dtype=torch.float64)
    (x,) = _given((6, 6, 12))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    found: list[Any] = []
    for sbp in (None, B, S(0), S(1)):
        attention.zero_grad()
        module, given = attention, x.clone()
        if sbp is not None:
            module = consistent.parallelize(_copy(attention), _placement(n))
            given = consistent.distribute(given, _placement(n), sbp)
        given.requires_grad_()
        y, weights = module(given, given, given, attn_mask=mask, need_weights=need_weights)
        y.square().sum().backward()
        grads = [given.grad, *(p.grad for p in module.parameters())]
        values = [y, *([weights] if need_weights else []), *grads]
        found.append([t.detach() if sbp is None else t.detach().full() for t in values])
    return found


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    import copy

    return copy.deepcopy(module)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_is_that_of_one_device(batch_first: bool, need_weights: bool) -> None:
    for n in (2, 3):
        for want, *others in pool(n).run(_modules, n, batch_first, need_weights):
            for found in others:
                for a, b in zip(found, want, strict=True):
                    torch.testing.assert_close(a, b)


def _encoder(rank: int, n: int, training: bool) -> list:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        8, 4, 16, batch_first=True, dropout=0.0, dtype=torch.float64
    )
    layer.train(training)
    (x,) = _given((5, 4, 8))
    want = layer(x).detach()
    module = consistent.parallelize(layer, _placement(n))
    with torch.set_grad_enabled(training):
        found = [
            module(consistent.distribute(x, _placement(n), sbp)).full() for sbp in (B, S(0), S(1))
        ]
    return [want, *found]


@pytest.mark.parametrize("training", [False, True])
def test_encoder_layer_takes_no_fast_path_that_sees_the_shard(training: bool) -> None:
    for want, *found in pool(2).run(_encoder, 2, training):
        for value in found:
            torch.testing.assert_close(value, want)
