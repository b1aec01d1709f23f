"""Bad input raises on every rank, and says what was given, why it cannot be, and what to call
instead."""

# ruff: noqa: E501 - tables of cases read best in long lines
# fmt: off

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, S
from tests.ranks import pool

# (code, words of the message). `rank`, `p` (ranks 0 and 1), `q` (ranks 1 and 0), `x` S(0) f32[4,
# 3], `local` (2, 3) are known.
BAD: dict[str, tuple[str, list[str]]] = {
    "a rank twice": ("consistent.placement('cpu', [0, 0])", ["rank 0 stands twice", "Name each rank once"]),
    "a rank outside the world": ("consistent.placement('cpu', [0, 7])", ["rank 7", "outside the world", "2 ranks"]),
    "a negative rank": ("consistent.placement('cpu', [-1, 0])", ["rank -1", "outside the world"]),
    "no ranks": ("consistent.placement('cpu', [])", ["ranks"]),
    "a ragged grid": ("consistent.placement('cpu', [[0], [0, 1]])", ["ranks"]),
    "an unknown device type": ("consistent.placement('tpu', [0])", ["tpu", "cpu"]),
    "too many sbps": ("consistent.distribute(local, p, (S(0), B))", ["2 entries", "1 axes", "one SBP per axis"]),
    "too few sbps": ("x.to_global(sbp=())", ["0 entries", "1 axes"]),
    "a split dim out of range": ("consistent.distribute(local, p, S(2))", ["S(2)", "(2, 3)", "Split one of its dims"]),
    "a split dim too negative": ("x.to_global(sbp=S(-3))", ["S(-3)", "(4, 3)"]),
    "a split of a scalar": ("x.sum().to_global(sbp=S(0))", ["S(0)", "no dim to split"]),
    "an sbp that is none": ("x.to_global(sbp=3.5)", ["3.5", "not an SBP", "Give S(dim)"]),
    "an sbp text with a fault": ("x.to_global(sbp='S(0')", ["S(0", "^"]),
    "a bool that is partial": ("(x > 0).to_global(sbp=P)", ["bool", "P", "Use S or B"]),
    "pieces that fit no split": ("consistent.from_local(torch.zeros(2 + 3 * rank, 3), p, S(0))", ["rank 0", "(2, 3)", "f32[7, 3] S(0)", "(4, 3)"]),
    "pieces of other sizes along other dims": ("consistent.from_local(torch.zeros(2, 3 + rank), p, S(0))", ["rank 1", "(2, 4)"]),
    "pieces of other numbers of dims": ("consistent.from_local(torch.zeros([2] * (rank + 1)), p, S(0))", ["rank 1", "(2, 2)"]),
    "pieces that do not fit the shape": ("consistent.from_local(local, p, S(0), shape=(5, 3), check=True)", ["rank 0", "(2, 3)", "(3, 3)"]),
    "pieces of other dtypes": ("consistent.from_local(local.to([torch.float32, torch.float64][rank]), p, S(0), check=True)", ["rank 1", "float64"]),
    "B pieces of other shapes": ("consistent.from_local(torch.zeros(2 + rank), p, B, check=True)", ["rank 1", "(3,)"]),
    "B pieces of other values": ("consistent.from_local(local + rank, p, B, check=True)", ["values"]),
    "pieces under other sbps": ("consistent.from_local(local, p, [S(0), S(1)][rank], check=True)", ["S(1)"]),
    "whole tensors of other values": ("consistent.distribute(local + rank, p, S(0), check=True)", ["differ"]),
    "whole tensors of other shapes": ("consistent.distribute(torch.zeros(2 + rank), p, S(0), check=True)", ["differ"]),
    "an op across placements": ("x + consistent.distribute(local[:1], q, B)", ["different placements", "to_global(placement="]),
    "the class called": ("consistent.GlobalTensor(local)", ["from_local", "distribute"]),
    "item of many": ("x.item()", ["12 elements", "Index or reduce"]),
    "int of many": ("int(x)", ["12 elements", "Index or reduce"]),
    "float of many": ("float(x)", ["12 elements"]),
    "truth of many": ("bool(x)", ["12 elements"]),
    "index of many": ("[1, 2][x]", ["only integer tensors of a single element"]),
    "length of a scalar": ("len(x.sum())", ["0-d"]),
    "numpy of what requires grad": ("x.clone().requires_grad_().numpy()", ["requires grad", "detach()"]),
    "from_local of a global tensor": ("consistent.from_local(x, p, B)", ["global tensor", "to_global"]),
    "distribute of a global tensor": ("consistent.distribute(x, p, B)", ["global tensor", "to_global"]),
    "writing into a view that moved": ("x.long()[1:].add_(1)", ["view", "x[index] = value"]),
    "out= of a wrong shape": ("torch.add(x, 1, out=consistent.distribute(torch.zeros(3), p, B))", ["(4, 3)", "(3,)", "out="]),
    "backward of many": ("(x.requires_grad_() * 2).backward()", ["scalar", "sum()"]),
    "backward with a gradient of another shape": ("(x.requires_grad_() * 2).backward(torch.ones(3))", ["(3,)", "(4, 3)"]),
    "a deep copy of a result": ("copy.deepcopy(x.requires_grad_() * 2)", ["leaves", "detach().clone()"]),
    "moving to another type of device": ("x.to('meta')", ["meta", "placement"]),
    "shapes that do not add": ("x + torch.ones(5)", ["size of tensor"]),
    "shapes that do not multiply": ("x @ x", ["4x3", "shapes"]),
    "a reshape of another size": ("x.reshape(5)", ["shape '[5]' is invalid"]),
    "a dim out of range": ("x.sum(3)", ["Dimension out of range"]),
    "an index out of range": ("x[4]", ["out of bounds"]),
    "in place into another shape": ("x.add_(torch.ones(2, 4, 3))", ["shape"]),
}  # fmt: skip


def _messages(rank: int, codes: dict[str, str]) -> dict[str, str]:
    """What each code raises on this rank. One that leaves a rank behind would hang the next."""
    import copy

    found = {}
    p, q = consistent.placement("cpu", [0, 1]), consistent.placement("cpu", [1, 0])
    for name, code in codes.items():
        local = torch.arange(6.0).view(2, 3)
        x = consistent.distribute(torch.arange(12.0).view(4, 3), p, S(0))
        scope = {"consistent": consistent, "torch": torch, "copy": copy, "rank": rank, "p": p, "q": q, "x": x, "local": local}
        try:
            eval(code, {**scope, "S": S, "B": B, "P": P})  # noqa: S307 - lines of this file
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return pool(2).run(_messages, {name: code for name, (code, _) in BAD.items()})


@pytest.mark.parametrize("name", BAD)
def test_raises_on_every_rank_and_says_why(name: str, messages: list[dict[str, str]]) -> None:
    for rank, found in enumerate(messages):
        missing = [word for word in BAD[name][1] if word not in found[name]]
        assert not missing, f"rank {rank}: {found[name]}"


def test_a_distributed_program_before_init_says_how_to_start() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"init_process_group|torchrun"):
        consistent.distribute(torch.ones(2), consistent.placement("cpu", [0, 1]), S(0))


def test_a_placement_of_this_process_alone_needs_no_init() -> None:
    x = consistent.distribute(torch.arange(3.0), consistent.placement("cpu", [0]), S(0)).requires_grad_()
    (x * x).sum().backward()
    assert x.grad.tolist() == [0, 2, 4] and (x + 1).sum().item() == 6


def _off_on_one_rank(rank: int) -> str:
    p = consistent.placement("cpu", [0, 1])
    with consistent.check_mode():
        try:
            consistent.from_local(torch.zeros(2 + rank, 3), p, S(0), shape=(4, 3))
        except ValueError as error:
            return str(error)
    return ""


def test_in_check_mode_every_rank_hears_of_a_piece_that_does_not_fit_the_shape() -> None:
    for message in pool(2).run(_off_on_one_rank):
        assert "rank 1 has a piece of shape (3, 3)" in message


def _hidden_alias(rank: int) -> Any:
    """Two leaves whose gradients are one tensor to torch get each its own spec."""
    p = consistent.placement("cpu", [0, 1])
    a = consistent.distribute(torch.ones(2, 2), p, S(0)).requires_grad_()
    b = consistent.distribute(torch.ones(1, 2), p, B).requires_grad_()
    ga, gb = torch.autograd.grad((a + b).sum(), [a, b])
    return tuple(ga.shape), tuple(gb.shape), gb.tolist()


def test_gradients_that_torch_shares_have_their_own_shapes() -> None:
    for found in pool(2).run(_hidden_alias):
        assert found == ((2, 2), (1, 2), [[2.0, 2.0]])
