"""Global tensors to DTensors and back, whose pieces of uneven dims are others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, Placement, S
from consistent.checkpoint import from_dtensor, to_dtensor
from tests.ranks import on_ranks

GRIDS = {2: [0, 1], 3: [0, 1, 2], 4: [[0, 1], [2, 3]]}


@on_ranks(2, 3, 4)
def test_every_layout_there_and_back(rank: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    world = torch.distributed.get_world_size()
    placement = Placement("cpu", GRIDS[world])
    for shape in ((10, 3), (5, 4), (1, 2), (0, 3)):
        whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        for sbp in itertools.product((S(0), S(1), B, P), repeat=placement.ndim):
            x = consistent.distribute(whole, placement, (B,) * placement.ndim).to_global(sbp=sbp)
            d = to_dtensor(x)
            assert isinstance(d, DTensor) and d.shape == x.shape
            assert torch.equal(d.full_tensor(), whole), (shape, sbp)
            y = from_dtensor(d)
            assert y._spec is x._spec and torch.equal(y.to_local(), x.to_local()), (shape, sbp)
            kept = [Replicate() if p.is_partial() else p for p in d.placements]
            z = from_dtensor(distribute_tensor(whole, d.device_mesh, kept))
            assert torch.equal(z.full(), whole), (shape, sbp)


@on_ranks(3)
def test_memory_is_shared_where_both_cut_alike(rank: int) -> None:
    placement = Placement.all("cpu")
    for shape, sbp in (((6, 2), S(0)), ((5, 2), B), ((4, 3), S(1))):
        x = consistent.zeros(*shape, placement=placement, sbp=sbp)
        d = to_dtensor(x)
        d.to_local().add_(1)
        assert x.sum().item() == shape[0] * shape[1]
        from_dtensor(d).add_(1)
        assert x.sum().item() == 2 * shape[0] * shape[1]


@on_ranks(4)
def test_a_dim_that_fsdp_cut_after_tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8))
    wanted = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = from_dtensor(model[0].weight)
    assert x.placement == Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    assert x.sbp == (S(0), S(0)) and torch.equal(x.full(), wanted)


@on_ranks(3)
def test_what_has_no_twin(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial

    x = consistent.zeros(3, placement=Placement("cpu", [2, 0, 1]), sbp=S(0))
    with pytest.raises(ValueError, match="do not ascend along each axis"):
        to_dtensor(x)
    mesh = DeviceMesh("cpu", [0, 1, 2])
    with pytest.raises(ValueError, match=r"the mesh has ranks \[0, 1, 2\]"):
        to_dtensor(x, mesh)
    d = DTensor.from_local(torch.ones(3), mesh, [Partial("avg")])
    with pytest.raises(ValueError, match="partial as a sum, max or min"):
        from_dtensor(d)
    with pytest.raises(TypeError, match="not a global tensor"):
        to_dtensor(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a DTensor"):
        from_dtensor(x)
