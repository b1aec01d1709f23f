"""A global tensor answers, prints, copies and combines as the logical tensor it is."""

# ruff: noqa: E501 - tables of cases read best in long lines
# fmt: off

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import consistent
from consistent import B, GlobalTensor, P, S
from tests.ranks import in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, compare, randn

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any]) -> None:
    for world in in_turn(CASES.index(function)):
        pool(world).run(compare, function, GRIDS[world], timeout=30)


def _some(at: Laid) -> list[Any]:
    """One matrix in several layouts, each of which is another on the axes of this world."""
    x, axes = randn(5, 4), 2 if torch.distributed.get_world_size() == 4 else 1
    layouts = ((S(0), B), (S(1), S(0)), (B, B), (P, S(1)), (S(0), S(0)), (P, P))
    return [at(x, *e) for e in dict.fromkeys(each[:axes] for each in layouts)]


@case
def what_it_is(at: Laid) -> Any:
    found = []
    for x in [*_some(at), at(randn(0, 3), S(0)), at(randn(), P), at(torch.arange(5), S(0)), at(torch.ones(3).bool(), S(0))]:
        found.append((
            tuple(x.shape), tuple(x.size()), x.dim(), x.ndim, x.ndimension(), x.numel(), x.nelement(), x.dtype,
            x.device.type, x.is_cuda, x.is_cpu, x.is_meta, x.element_size(), x.itemsize, x.nbytes, x.is_floating_point(),
            x.is_complex(), x.is_sparse, x.layout, x.requires_grad, x.is_leaf, x.grad_fn, x.grad, x.stride(), x.is_contiguous(),
            torch.is_tensor(x), torch.numel(x), torch.is_floating_point(x), [x.size(d) for d in range(x.ndim)], x.T.shape[::-1],
            x.is_signed(), x.is_inference(), x.is_conj(), x.is_neg(),
        ))  # fmt: skip
    return found


@case
def reading_values(at: Laid) -> Any:
    found: list[Any] = []
    for x in _some(at):
        found += [x.tolist(), x.numpy().tolist(), np.asarray(x).tolist(), x.sum().item(), float(x.max()), int(x.sum()), len(x)]
        found += [bool((x > 0).any()), [row.tolist() for row in x], f"{x.sum().item():.3f}", x[0, 0].item(), complex(x[1, 1])]
        found += [list(range(10))[at(torch.tensor(3))], x.any().item(), (x[0] in x) if x.ndim == 1 else 0, x.sum().tolist()]
        found += [bool(torch.equal(x, x + 0)), bool(torch.allclose(x, x)), torch.isnan(x).any().item()]
    return found


@case
def operators(at: Laid) -> Any:
    found = []
    row = randn(4, seed=9)
    for x in _some(at):
        y = at(randn(5, 4, seed=2), S(1))
        found += [x + y, x - 1, 2 * x, 1 / (x * x + 1), x // 0.3, x % 0.7, 2**x, x**2, -x, abs(x), +x]
        found += [x @ y.T, x > y, x >= 0, x == x, x != y, (x > 0) & (y > 0), (x > 0) | (y > 0), ~(x > 0), (x > 0) ^ (y > 0)]
        found += [x + row, row - x, row * x, x @ row, torch.add(row, x, alpha=2), torch.where(x > 0, x, row), x < row]
        found += [np.float64(2.0) * x, x * torch.tensor(2.0), torch.maximum(x, torch.tensor(0.0, dtype=x.dtype)), divmod(7, 2)]
        found += [x.long() << 1, x.long() >> 1, 3 & x.long(), x.lerp(y, 0.3), x.clamp(-0.5, 0.5), x.clamp(min=y), torch.sin(x)]
    return found


@case
def in_place_operators(at: Laid) -> Any:
    found = []
    for x in _some(at):
        z = x.clone()
        z += 1
        z -= randn(5, 4, seed=3)
        z *= at(randn(5, 4, seed=4), S(1))
        z /= 2
        z **= 2
        z.add_(x, alpha=2).clamp_(max=3).sub_(at(randn(4, seed=5), P)).exp_()
        found.append(z.clone())
        z.zero_()
        z.fill_(3)
        z.copy_(x)
        z[z < 0] = 0
        z[1] = 7
        z[:, 1] = randn(5, seed=6)
        z[2:, ::2] = at(randn(3, 2, seed=7), S(0))
        z[[0, 1], [1, 2]] = 5
        z.masked_fill_(z > 6, -1)
        found.append(z)
    return found


@case
def indexing(at: Laid) -> Any:
    found = []
    rows, keep = torch.tensor([3, 0, 3]), torch.tensor([True, False, True, True, False])
    for x in _some(at):
        found += [x[0], x[-1], x[1:3], x[:, 2], x[..., 1:], x[::2], x[None], x[2, 1], x[rows], x[:, rows], x[keep], x[[0, 2]]]
        found += [x[x > 0], x[at(rows)], x[at(keep, S(0))], x[rows, torch.tensor([1, 2, 0])], x[1:1], x[()], x[..., None, :]]
        found += [*x.split(2), *x.chunk(3, 1), *x.unbind(1), x.index_select(0, rows), x.gather(1, rows[:, None]), x.nonzero()]
        found += [torch.cat([x, x[:1]]), torch.stack([x, x], 1), x.roll(1, 0), x.flip(0), x.tril(), x.diagonal(), x.repeat(2, 1)]
        found += [x.sort(0).values, x.topk(2, 0).values, x.argmax(0), x.cumsum(0), torch.unique(x.long()), *x.max(0), *x.min(1)]
    return found


@case
def methods(at: Laid) -> Any:
    found = []
    for x in _some(at):
        found += [x.T, x.mT, x.t(), x.H, x.real, x.permute(1, 0), x.reshape(2, 10), x.reshape(-1), x.flatten(), x.view(5, 2, 2)]
        found += [x.unsqueeze(0).squeeze(0), x.expand(2, 5, 4), x.contiguous(), x.clone(), x.detach(), x.data, x.cpu(), x.double()]
        found += [x.float(), (x > 0).half(), x.to(torch.float32), x.to("cpu"), x.to(randn(1).float()), x.type(torch.int32), x.int()]
        found += [randn(3).to(x.float()), randn(2, 3).to(x, copy=True), randn(2).to(tensor=x.double()), randn(4).float().to(x) * 2]
        found += [x.to(tensor=randn(1).float()), x.type_as(randn(1).float()), x.bool(), x.softmax(0), x.norm(), x.norm(dim=0), x.std(), x.var(0), x.mean(1), x.prod()]
        found += [x.new_zeros(2, 3), x.new_ones(2), x.new_full((2,), 3.0), x.new_tensor([1.0, 2.0]), x.new_empty(3).zero_()]
        found += [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), torch.empty_like(x).fill_(1), x.view_as(x)]
        found += [torch.einsum("ij,kj->ik", x, x), torch.linalg.norm(x), torch.logsumexp(x, 1), nn.functional.gelu(x), x.abs().log1p()]
        found += [x.masked_select(x > 0), x.type(), x.tolist() == x.clone().tolist(), torch.result_type(x, 1.0), x.is_same_size(x)]
        found += [torch.broadcast_to(x, (2, 5, 4)), *torch.broadcast_tensors(x, x[0]), torch.svd(x)[1], x.det() if x.shape[0] == 4 else 0]
    return found


@case
def out_and_lists(at: Laid) -> Any:
    found = []
    for x in _some(at):
        out = at(torch.zeros(5, 4, dtype=torch.float64), S(1))
        torch.add(x, 1, out=out)
        found.append(out.clone())
        torch.sin(x, out=out)
        found += [out, torch.block_diag(x, x), torch.meshgrid(x[0], x[1], indexing="ij"), torch.cartesian_prod(x[0], x[1])]
        values, indices = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
        found += [torch.atleast_3d(x), torch.hstack([x, x]), torch.vstack((x, x)), values, indices]
    return found


@case
def views_write_through(at: Laid) -> Any:
    x = at(torch.zeros(6, 4, dtype=torch.float64), S(0))
    x[:, 1].fill_(3)
    x.T[2].add_(1)
    x.view(6, 2, 2)[:, 1, 1].mul_(0).sub_(2)
    y = at(torch.zeros(4, dtype=torch.float64))
    y[1:].add_(1)
    y.view(2, 2)[0] += 5
    return x, y


@case
def copies_gathered_by_tensors_may_be_written(at: Laid) -> Any:
    x = at(randn(5, 4), S(0))
    y, z = x[torch.tensor([0, 2, 4])], x[[1, 3]]
    y += 1
    z.mul_(2)
    return x, y, z


@case
def deepcopies_and_pickles(at: Laid) -> Any:
    found = []
    for x in [*_some(at), at.leaf(randn(5, 4), S(0)), at.leaf(randn(3))]:
        if x.requires_grad:
            (x * 2).sum().backward()
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        for y in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x)), torch.load(buffer, weights_only=True)):
            assert type(y) is type(x) and y.requires_grad == x.requires_grad and y.is_leaf
            if at.placement is not None:
                assert y.sbp == x.sbp and y.placement == x.placement
            found.append(y)
        deep = copy.deepcopy(x)
        with torch.no_grad():
            deep.add_(1)
        found += [x, deep, deep.grad, x.grad]
    twins = copy.deepcopy([x, x])
    return found, twins[0] is twins[1]


@case
def parameters(at: Laid) -> Any:
    p = nn.Parameter(at(randn(3, 2), S(0)))
    q = copy.deepcopy(p)
    frozen = nn.Parameter(at(randn(3, 2), S(0)), requires_grad=False)
    (p * q).sum().backward()
    q.data = at(randn(3, 2, seed=1), S(1))
    q.data.mul_(2)
    return isinstance(p, nn.Parameter), isinstance(q, nn.Parameter), p.grad, q.grad, q, frozen.requires_grad


def sbp_of(dim: int) -> Any:
    return consistent.sbp.split(dim)


@on_ranks(2)
def test_to_global_and_to_local_say_where_the_pieces_lie(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    shard = torch.arange(3.0) + 10 * rank
    x = consistent.from_local(shard, p, S(0))
    assert type(x) is GlobalTensor and x.sbp == (S(0),) and x.placement == p and tuple(x.shape) == (6,)
    assert type(x.to_local()) is torch.Tensor and x.to_local().data_ptr() == shard.data_ptr()
    assert x.to_global(sbp=B).to_local().tolist() == [0, 1, 2, 10, 11, 12]
    assert x.to_global() is x and x.to_global(sbp=S(0)) is x
    assert x.to_global(sbp="B").sbp == (B,) and x.to_global(sbp=sbp_of(-1)).sbp == (S(0),)
    part = x.to_global(sbp=P)
    assert part.sbp == (P,) and part.full().tolist() == x.full().tolist()
    summed = consistent.from_local(shard, p, P)
    assert summed.to_global(sbp=S(0)).full().tolist() == [10, 12, 14]
    with torch.no_grad():
        y = x.to_global(sbp=B, grad_sbp=S(0))
    assert y.sbp == (B,)


@on_ranks(2)
def test_gradients_pass_from_local_and_to_local(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.ones(4), p, S(0)).requires_grad_()
    (x * 2).to_local().mul(rank + 1.0).sum().backward()
    assert x.grad.full().tolist() == [2, 2, 4, 4]
    b = consistent.distribute(torch.ones(2), p, B).requires_grad_()
    b.to_local().mul(rank + 1.0).sum().backward()  # the local gradient is an addend
    assert b.grad.full().tolist() == [3, 3]
    shard = torch.ones(2).requires_grad_()
    g = consistent.from_local(shard, p, S(0))
    (g * torch.arange(4.0)).sum().backward()
    assert shard.grad is not None and shard.grad.tolist() == [2.0 * rank, 2.0 * rank + 1]


def _outside(rank: int) -> Any:
    """Rank 0 is outside the placement, runs the same program and knows every value."""
    p = consistent.placement("cpu", [2, 1])
    x = consistent.distribute(randn(4, 3), p, S(0)).requires_grad_()
    y = torch.softmax(x @ randn(3, 3, seed=1), 0).view(2, 2, 3).sum(1)
    y.square().sum().backward()
    assert (rank == 0) == (x.to_local().numel() == 0) and tuple(x.to_local().shape)[0:1] in ((0,), (2,))
    assert tuple(y.shape) == (2, 3) and y.device.type == "cpu" and not y.is_meta
    return y.tolist(), x.grad.tolist(), y.sum().item()


def test_ranks_outside_the_placement_follow_the_program() -> None:
    results = pool(3).run(_outside)
    assert results[0] == results[1] == results[2]
