"""What boxings are said to send from host to host is what they do send, byte for byte."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, P, Placement, S
from consistent.boxing.plan import plan
from consistent.movement.between_hosts import bytes_between
from consistent.spec import TensorSpec
from mirrored.transports.default import current
from tests.mirrored.transports.several_hosts.kinds import on_hosts

SHAPES = [(97, 300), (5, 7)]  # of 116 KB, which an all-reduce sends in two rounds, and of 140 bytes
MOVES = [(S(0), B), (P, B), (P, S(0)), (P, S(1)), (S(0), S(1)), (B, S(0)), (S(1), P)]
GRID = [((S(0), P), (B, B)), ((P, P), (S(0), S(1))), ((S(0), S(1)), (S(1), S(0)))]


def _each(rank: int, grid: bool) -> list[tuple[object, int | None, int]]:
    """(the boxing, what all ranks are said to send, what this one has sent) of each."""
    world = range(current().size)
    whole = Placement("cpu", [[0, 1], [2, 3]] if grid else world)
    routes = [(whole, a, whole, b) for a, b in (GRID if grid else MOVES)]
    if grid:  # from one placement to another
        first, last = Placement("cpu", [0, 1]), Placement("cpu", [3, 1])
        routes += [(first, S(0), last, S(1)), (first, P, last, B)]
    current().all_reduce(torch.ones(1), tuple(world))
    found = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for place, src, target, dst in routes:
                x = torch.ones(shape, dtype=dtype)
                x = consistent.distribute(x, place, (B,) * place.ndim).to_global(sbp=src)
                end = TensorSpec.of(target, dst, shape, dtype)
                said = bytes_between(x._spec, plan(x._spec, end))
                x.to_global(target, sbp=dst)  # ranks of each group have met
                before = current().bytes_by_messages()
                x.to_global(target, sbp=dst)
                sent = current().bytes_by_messages() - before
                found.append(((shape, dtype, str(src), str(dst)), said, sent))
    return found


@pytest.mark.parametrize(
    "hosts, grid",
    [("xx", False), ("xy", False), ("xyx", False), ("xxyy", False), ("xxyy", True)],
)
def test_it_is_what_ranks_send(hosts: str, grid: bool) -> None:
    told = on_hosts(hosts, _each, grid)
    for each in zip(*told, strict=True):
        what, said, _ = each[0]
        assert [say for _, say, _ in each] == [said] * len(each), what
        assert said == sum(sent for *_, sent in each), what
    if len(set(hosts)) > 1:
        assert sum(said for _, said, _ in told[0] if said) > 0


def _explained(rank: int) -> tuple[int | None, int, int, str]:
    everywhere = Placement("cpu", range(4))
    x = consistent.distribute(torch.ones(8, 64), everywhere, S(0))
    with consistent.report() as found:
        torch.add(x.sum(0), x.to_global(sbp=B))
    y = consistent.distribute(torch.ones(8, 64), everywhere, S(1))
    explained = consistent.explain(torch.add, x, y)
    return explained["add"].between, found.between, found.by_messages, str(found) + str(explained)


def test_explain_and_report_say_it() -> None:
    told = on_hosts("xxyy", _explained)
    between, reported, _, text = told[0]
    assert between and f"{between:,} of all ranks from host to host" in text
    assert reported and reported == sum(sent for *_, sent, _ in told)
    assert f"{reported:,} of all ranks from host to host" in text and "between hosts" in text


def _trained(rank: int, plan_name: str) -> tuple[int, int]:
    torch.manual_seed(0)
    everywhere = Placement("cpu", range(4))
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    consistent.parallelize(model, everywhere, plan_name)
    x = consistent.distribute(torch.ones(32, 256), everywhere, S(0))
    F.mse_loss(model(x), x).backward()
    with consistent.report() as found:
        F.mse_loss(model(x), x).backward()
    return found.between, found.by_messages


@pytest.mark.parametrize("plan_name, more", [("zero3", 0), ("tensor", 0), ("data", 0.01)])
def test_a_report_of_a_step_says_what_is_sent_beside_backward_too(
    plan_name: str, more: float
) -> None:
    """A bucket of small gradients goes in one all-reduce, which sends less than one for each."""
    told = on_hosts("xxyy", _trained, plan_name)
    sent = sum(nbytes for _, nbytes in told)
    assert sent and sent <= told[0][0] <= sent * (1 + more)
