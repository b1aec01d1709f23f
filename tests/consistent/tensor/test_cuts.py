"""Tensors whose splits are cut in other ways: made, read, moved, written to, drawn and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, P, S, checkpoint
from tests.ranks import on_ranks, pool

WAYS = ('S(0, cut="zigzag")', "S(0, blocks=2)", "S(0, of=4)", "S(1, blocks=1)")


def value() -> torch.Tensor:
    return torch.arange(8.0 * 5, dtype=torch.float64).view(8, 5)


def line() -> Any:
    return consistent.placement.all("cpu")


@on_ranks(2, 3)
def test_a_tensor_is_read_whole_and_printed(rank: int) -> None:
    for way in WAYS:
        x = consistent.distribute(value(), line(), way)
        assert torch.equal(x.full(), value())
        assert x.sum().item() == value().sum().item()
        assert str(x.sbp[0]) == way
        assert torch.equal(x.to_global(sbp=S(0)).full(), value())
        assert torch.equal(x.to_global(sbp=WAYS[0]).to_global(sbp=P).full(), value())


@on_ranks(2)
def test_pieces_are_taken_as_they_are(rank: int) -> None:
    piece = value()[[0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]]
    x = consistent.from_local(piece, line(), S(0, cut="zigzag"))
    assert torch.equal(x.full(), value())
    piece_of_3 = value()[:3] if rank == 0 else value()[3:]
    ragged = consistent.from_local(piece_of_3, line(), S(0, sizes=(3, 5)))
    assert torch.equal(ragged.full(), value())
    with pytest.raises(ValueError, match="has a piece of shape"):
        consistent.from_local(piece, line(), S(0, sizes=(3, 5)), shape=(8, 5))


@on_ranks(2)
def test_ranks_that_say_other_sizes_all_raise(rank: int) -> None:
    sizes = (3, 5) if rank == 0 else (5, 3)
    x = consistent.distribute(value(), line(), S(0, sizes=sizes))
    with pytest.raises(RuntimeError, match="sends 120 bytes"):
        x.full()
    with pytest.raises(ValueError, match="do not agree"):
        consistent.from_local(value()[:4], line(), S(0, sizes=sizes))


@on_ranks(2)
def test_sizes_that_do_not_fit_raise_on_all_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="7 items together"):
        consistent.distribute(value(), line(), S(0, sizes=(3, 4)))
    x = consistent.distribute(value(), line(), S(0))
    with pytest.raises(ValueError, match="no whole number of parts of 3"):
        x.to_global(sbp=S(0, of=3))


@on_ranks(2, 3)
def test_gradients_and_writes(rank: int) -> None:
    leaf = value().requires_grad_()
    (leaf.exp().cumsum(0) * value()).sum().backward()
    for way in WAYS:
        x = consistent.distribute(value(), line(), way).requires_grad_()
        (x.exp().cumsum(0) * consistent.distribute(value(), line(), B)).sum().backward()
        torch.testing.assert_close(x.grad.full(), leaf.grad)
        y = consistent.distribute(value(), line(), way)
        y[2:5, 1] = 0
        y.mul_(2).add_(1)
        want = value()
        want[2:5, 1] = 0
        assert torch.equal(y.full(), want * 2 + 1)
        assert str(y.sbp[0]) == way


@on_ranks(2, 3)
def test_random_numbers_are_those_of_the_logical_tensor(rank: int) -> None:
    def drawn(way: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = consistent.randn(8, 5, placement=line(), sbp=way)
        made: list[Any] = [x, F.dropout(x, 0.4), torch.rand_like(x), torch.bernoulli(x.sigmoid())]
        made += [x.clone().uniform_(), F.dropout(x.unsqueeze(0), 0.3), F.feature_alpha_dropout(x)]
        return [y.full() for y in made]

    want = drawn(B)
    for way in WAYS:
        for found, wanted in zip(drawn(way), want, strict=True):
            torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_factories(rank: int) -> None:
    for way in (WAYS[0], "S(0, sizes=(7, 1))"):
        assert torch.equal(consistent.eye(8, placement=line(), sbp=way).full(), torch.eye(8))
        assert torch.equal(consistent.arange(8, placement=line(), sbp=way).full(), torch.arange(8))


@on_ranks(3)
def test_between_placements(rank: int) -> None:
    two, three = consistent.placement("cpu", [0, 2]), line()
    for src in WAYS:
        for dst in (*WAYS, S(0), B):
            x = consistent.distribute(value(), two, src).requires_grad_()
            y = x.to_global(placement=three, sbp=dst)
            (y * y).sum().backward()
            assert torch.equal(y.detach().full(), value())
            torch.testing.assert_close(x.grad.full(), 2 * value())


def test_what_is_boxed_stands_in_the_report() -> None:
    for text in pool(2).run(_report):
        assert 'S(0, cut="zigzag") -all_to_all(0)-> S(' in text
        assert "exp" in text


def _report(rank: int) -> str:
    x = consistent.distribute(value(), line(), S(0, cut="zigzag"))
    with consistent.report() as report:
        x.exp().cumsum(0)
    return str(report)


def _saved(rank: int, folder: str) -> None:
    for k, (src, dst) in enumerate([(WAYS[0], S(1)), (S(0), WAYS[1]), (WAYS[2], WAYS[3])]):
        path = str(Path(folder) / str(k))
        checkpoint.save(path, x=consistent.distribute(value(), line(), src))
        x = consistent.distribute(torch.zeros(8, 5, dtype=torch.float64), line(), dst)
        checkpoint.load(path, x=x)
        assert torch.equal(x.full(), value())
        assert x.sbp == consistent.distribute(value(), line(), dst).sbp


def test_a_checkpoint_of_any_cut_loads_under_any_other(tmp_path: Path) -> None:
    pool(2).run(_saved, str(tmp_path))
