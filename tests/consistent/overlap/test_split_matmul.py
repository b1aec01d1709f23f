"""What does not fit is said before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B, S, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from consistent.spec import Placement
from consistent.tensor.making.create import distribute
from mirrored.transports.counting import counting
from tests.ranks import simulate

Made = dict[str, Any]


def _refused(call: Any) -> str:
    def on_rank(rank: int) -> tuple[str, int]:
        made = {
            f"{name}_{where}": distribute(torch.ones(shape), Placement("cpu", range(2)), (sbp,))
            for name, shape in (("x", (6, 4)), ("w", (4, 8)))
            for where, sbp in (("b", B), ("rows", S(0)), ("columns", S(1)))
        }
        with counting() as log, pytest.raises((ValueError, TypeError)) as error:
            call(made)
        return str(error.value), len(log.calls)

    (text, calls), other = simulate(on_rank, 2)
    assert (text, calls) == other and calls == 0
    return text


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda t: matmul_all_reduce(t["x_b"], t["w_b"]), "no axis has x S\\(-1\\) and w S\\(0\\)"),
        (lambda t: matmul_reduce_scatter(t["x_rows"], t["w_b"]), "nothing to sum"),
        (lambda t: all_gather_matmul(t["x_b"], t["w_columns"]), "nothing is gathered"),
        (lambda t: matmul_all_reduce(t["x_rows"], t["w_rows"]), "have no product there"),
        (lambda t: matmul_all_reduce(t["x_columns"], t["w_columns"].T), r"\[..., k\] and \[k, n\]"),
        (lambda t: matmul_all_reduce(t["x_columns"], t["w_rows"], torch.ones(3)), "8 columns"),
        (lambda t: matmul_all_reduce(t["x_columns"].double(), t["w_rows"]), "dtypes differ"),
        (
            lambda t: matmul_all_reduce(t["x_columns"], t["w_rows"], activation="tanh"),
            '"tanh" is not known',
        ),
        (lambda t: matmul_all_reduce(t["x_columns"], t["w_rows"], chunks=0), "chunks=0"),
        (lambda t: matmul_reduce_scatter(t["x_columns"], t["w_rows"], dim=2), "dim=2"),
        (lambda t: matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2)), "plain tensors"),
        (
            lambda t: matmul_all_reduce(
                t["x_columns"],
                consistent.empty(4, 8, placement=Placement("cpu", [1, 0]), sbp=(S(0),)),
            ),
            "different placements",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, why: str) -> None:
    text = _refused(call)
    assert len(text.split("\n")) == 3
    with pytest.raises(ValueError, match=why):
        raise ValueError(text)


def test_plain_tensors_beside_a_global_one_are_taken_as_b() -> None:
    def on_rank(rank: int) -> Any:
        x = distribute(torch.ones(6, 4), Placement("cpu", range(2)), (S(0),))
        w = distribute(torch.ones(4, 8), x.placement, (S(1),))
        return all_gather_matmul(x, w, torch.ones(8), chunks=2).sbp

    assert simulate(on_rank, 2) == [(S(1),)] * 2
