"""A tensor as text: what this rank knows of it, and nothing is sent."""

# ruff: noqa: E501 - what is printed stands in one line

from __future__ import annotations

import copy
import logging
import pickle
import sys
from typing import Any

import pytest
import torch

from consistent import B, P, Placement, S
from tests.alone import alone, laid
from tests.ranks import pool
from tests.twins import Laid

TWO, GRID = [0, 1], [[0, 1]]
ROW = torch.tensor([1.0, 2.0, 3.0, 4.0])
MATRIX = torch.arange(8.0).reshape(4, 2)


def _texts(x: Any) -> set[str]:
    logged = logging.LogRecord("", logging.INFO, "", 0, "%s", (x,), None).getMessage()
    return {repr(x), str(x), f"{x}", f"{x!r}", "%s" % (x,), "{}".format(x), logged}  # noqa: UP031, UP032


@pytest.mark.parametrize(
    ("rank", "full", "ranks", "sbp", "text"),
    [
        (0, ROW, TWO, (B,), 'tensor([1., 2., 3., 4.], placement=placement("cpu", ranks=[0, 1]), sbp=B)'),
        (0, ROW, TWO, (S(0),), 'tensor(shard of rank 0: [1., 2.], shape=(4,), placement=placement("cpu", ranks=[0, 1]), sbp=S(0))'),
        (1, ROW, TWO, (S(0),), 'tensor(shard of rank 1: [3., 4.], shape=(4,), placement=placement("cpu", ranks=[0, 1]), sbp=S(0))'),
        (1, ROW.double(), TWO, (S(0),), 'tensor(shard of rank 1: [3., 4.], dtype=torch.float64, shape=(4,), placement=placement("cpu", ranks=[0, 1]), sbp=S(0))'),
        (2, ROW, TWO, (B,), 'tensor(no value on rank 2, shape=(4,), dtype=torch.float32, placement=placement("cpu", ranks=[0, 1]), sbp=B)'),
        (1, MATRIX, TWO, (S(0),), 'tensor(shard of rank 1:\n       [[4., 5.],\n        [6., 7.]], shape=(4, 2), placement=placement("cpu", ranks=[0, 1]), sbp=S(0))'),
        (0, ROW, [0], (P,), 'tensor([1., 2., 3., 4.], placement=placement("cpu", ranks=[0]), sbp=P)'),
        (1, ROW, [0], (B,), 'tensor(no value on rank 1, shape=(4,), dtype=torch.float32, placement=placement("cpu", ranks=[0]), sbp=B)'),
        (0, ROW, GRID, (S(0), B), 'tensor([1., 2., 3., 4.], placement=placement("cpu", ranks=[[0, 1]]), sbp=(S(0), B))'),
        (2, ROW[:2], [0, 1, 2], (S(0),), 'tensor(shard of rank 2: [], shape=(2,), placement=placement("cpu", ranks=[0, 1, 2]), sbp=S(0))'),
    ],
)  # fmt: skip
def test_text_shows_the_value_or_the_shard_and_says_which(
    rank: int, full: torch.Tensor, ranks: list, sbp: tuple, text: str
) -> None:
    with alone(rank, 3):
        assert _texts(laid(full, Placement("cpu", ranks), sbp)) == {text}


@pytest.mark.parametrize("sbp", [S(0), B, P, P(max)])
def test_text_says_where_a_tensor_stands_in_the_graph(sbp: Any) -> None:
    for rank in range(3):
        with alone(rank, 3):
            x = laid(ROW, Placement("cpu", TWO), (sbp,))
            assert repr(x).endswith(f"sbp={sbp})")
            if not sbp.is_extreme:
                x.requires_grad_()
                assert repr(x).endswith(f"sbp={sbp}, requires_grad=True)")
                assert repr(2 * x).endswith(f"sbp={sbp}, grad_fn=<MulBackward0>)")


@pytest.mark.parametrize("world", [2, 3])
def test_a_number_is_formatted_where_it_is_known_and_marked_elsewhere(world: int) -> None:
    for rank in range(world):
        with alone(rank, world):
            inside, number = rank < 2, torch.tensor(2.5)
            whole, part = (
                laid(number, Placement("cpu", TWO), (B,)),
                laid(number, Placement("cpu", TWO), (P,)),
            )
            held = part.to_local().item() if inside else None
            unknown = f"(no value on rank {rank})"
            assert f"{whole:.3f}" == ("2.500" if inside else unknown)
            assert f"{whole}" == ("2.5" if inside else str(whole))
            assert f"{part:8.3f}" == (f"shard of rank {rank}: {held:8.3f}" if inside else unknown)
            assert f"{part}" == str(part) and "item" not in f"{part}"
            if inside:
                with pytest.raises(ValueError, match="Unknown format code"):
                    f"{whole:q}"
            with pytest.raises(TypeError, match="unsupported format string"):
                f"{laid(ROW, Placement('cpu', TWO), (B,)):.3f}"


def _one_rank_looks(rank: int) -> str | None:
    x = Laid(Placement("cpu", TWO))(MATRIX, S(0)).requires_grad_()
    loss = (x * 2).sum()
    if rank == 0:
        return None
    looked = [repr(x), str(loss), f"{loss:.3f}", repr(x.t()), x.is_contiguous(), x.T.stride()]
    looked += [x.get_device(), x.is_pinned(), hash(x), sys.getsizeof(x), dir(x), copy.deepcopy(x)]
    looked += [pickle.dumps(x), x in [x], {x: 1}, x.device, x.is_leaf, loss.grad_fn, x.grad]
    return looked[0]


def test_one_rank_of_two_looks_while_the_other_goes_on() -> None:
    for _ in range(2):
        first, second = pool(2).run(_one_rank_looks)
        assert first is None and second.startswith("tensor(shard of rank 1:\n")
