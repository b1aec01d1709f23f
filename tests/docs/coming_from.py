"""A program for each row of the tables in docs/coming_from.md: what stands on the right is done, on
four ranks, and checked. A row is named by its table and the first words of its left cell."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import consistent
import consistent.flow
import mirrored
from consistent import B, P, S, checkpoint

RANKS = 4
ROWS: dict[tuple[str, str], Callable[[], None]] = {}


def row(table: str, *starts: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(program: Callable[[], None]) -> Callable[[], None]:
        ROWS.update(dict.fromkeys([(table, start) for start in starts], program))
        return program

    return add


def line(**options: Any) -> Any:
    return consistent.placement("cpu", range(RANKS), **options)


def grid(*axes: str) -> Any:
    return consistent.placement("cpu", [[0, 1], [2, 3]], axes=axes)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def split(plan: Any, placement: Any = None, **options: Any) -> Any:
    return consistent.parallelize(model(), placement or line(), plan, **options)


def shared_folder() -> Path:
    """One empty folder for all ranks; it is left to the system's temporary files."""
    made = tempfile.mkdtemp() if mirrored.current().rank == 0 else ""
    return Path(mirrored.current().gather_objects(made, tuple(range(RANKS)))[0])


def same(x: Any, wanted: Any) -> None:
    torch.testing.assert_close(x.full() if hasattr(x, "full") else x, wanted)


X = torch.arange(32.0).view(4, 8)


@row("DTensor", "`DeviceMesh`", "`x.device_mesh`")
def _mesh() -> None:
    assert consistent.zeros(4, placement=grid("dp", "tp"), sbp=(B, B)).placement == grid("dp", "tp")


@row("DTensor", "`Shard(0)`", "`x.placements`", "`distribute_tensor(t", "`x.to_local()`")
def _distribute() -> None:
    x = consistent.distribute(X, line(), S(0), check=True)
    assert x.sbp == (S(0),) and str(P(max)) == "P(max)" and str(P(min)) == "P(min)"
    same(x.to_local(), X[mirrored.current().rank :][:1])
    same(x, X)


@row("DTensor", "`DTensor.from_local", "`x.redistribute")
def _local() -> None:
    x = consistent.from_local(X[:1] + mirrored.current().rank, line(), S(0))
    assert x.shape == (4, 8) and x.to_global(sbp=B).sbp == (B,)
    other = consistent.placement("cpu", [3, 2, 1, 0])
    assert x.to_global(placement=other).placement == other


@row("DTensor", "`distribute_module`", "`ColwiseParallel()`")
def _plans() -> None:
    for plan in ({"0.*": S(0), "2.weight": S(1)}, "tensor"):
        net = split(plan)
        assert net[0].weight.sbp == (S(0),) and net[2].weight.sbp == (S(1),)
        same(net(X), model()(X))


@row("DTensor", "`SequenceParallel()`")
@row("Megatron", "`--sequence-parallel`")
def _sequence() -> None:
    block = nn.TransformerEncoderLayer(8, 4, dropout=0.0, batch_first=True)
    x = torch.ones(2, 4, 8).cumsum(1)
    wanted = block(x)
    net = consistent.parallelize(block, line(), "tensor+sequence")
    assert net.linear1.weight.sbp == (S(0),)
    same(net(x), wanted)


@row("DTensor", "`distribute_tensor` of an odd size")
def _odd() -> None:
    held = consistent.distribute(torch.ones(10), line(), S(0)).to_local().shape[0]
    assert mirrored.current().gather_objects(held, (0, 1, 2, 3)) == [3, 3, 2, 2]


@row("DTensor", "`implicit_replication()`")
def _plain_meets_global() -> None:
    same(consistent.distribute(X, line(), S(0)) + torch.ones(8), X + 1)


@row("DTensor", "`CommDebugMode()`")
def _report() -> None:
    with consistent.report() as ran:
        consistent.distribute(X, line(), S(0)).to_global(sbp=B)
    assert any("all_gather" in boxing for boxing in ran.boxings())


@row("DTensor", "`register_sharding(op)`")
def _rules() -> None:
    assert (Path(consistent.__file__).parent / "rules").is_dir()


@row("DTensor", "an op without a strategy")
def _whole() -> None:
    x = consistent.distribute(torch.eye(4), line(), S(0))
    with consistent.report() as ran:
        same(torch.linalg.matrix_exp(x), torch.linalg.matrix_exp(torch.eye(4)))
    assert "matrix_exp" in str(ran)


@row("DTensor", "`torch.distributed.checkpoint.save(")
@row("Megatron", "a converter between parallel sizes")
def _checkpoints() -> None:
    folder, net = shared_folder(), split("zero3")
    checkpoint.save(str(folder / "ours"), model=net)
    other = split({"0.*": S(0), "2.weight": S(1)}, consistent.placement("cpu", [0, 1]))
    with torch.no_grad():
        other[0].weight.zero_()
    checkpoint.load(str(folder / "ours"), model=other)
    same(other[0].weight, model()[0].weight)
    state = net.state_dict()
    dcp.save(state, checkpoint_id=str(folder / "dcp"))
    dcp.load(state, checkpoint_id=str(folder / "dcp"))
    x = consistent.distribute(X, line(), S(0))
    same(checkpoint.from_dtensor(checkpoint.to_dtensor(x)), X)


@row("FSDP2", "`fully_shard(model)`", "`reshard_after_forward=False`", "each rank passes its own")
@row(
    "FSDP2", "`torch.nn.utils.clip_grad_norm_", "`summon_full_params", "`set_requires_gradient_sync"
)
def _zero() -> None:
    wanted = model()
    wanted(X).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
    rank = mirrored.current().rank
    for plan in ("zero3", "zero2"):
        net = split(plan, inputs=S(0))
        net(X[rank : rank + 1]).square().sum().backward()
        same(nn.utils.clip_grad_norm_(net.parameters(), 1.0), norm)
        same(net[0].weight.grad, wanted[0].weight.grad)
        assert type(net[0].weight.full()) in (torch.Tensor, nn.Parameter)
    with consistent.no_sync():
        net(X[rank : rank + 1]).sum().backward()


@row("FSDP2", "`HSDP`")
def _hybrid() -> None:
    net = split({"dp": "data", "fsdp": "zero3"}, grid("dp", "fsdp"))
    assert net[0].weight.sbp == (B, S(0))
    same(net(X), model()(X))


@row("FSDP2", "`MixedPrecisionPolicy")
def _mixed() -> None:
    net = consistent.parallelize(model().bfloat16(), line(), "zero2")
    optimizer = consistent.master_weights(torch.optim.AdamW(net.parameters()))
    net(consistent.distribute(X.bfloat16(), line(), S(0))).sum().backward()
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        assert split("zero3")(X).dtype is torch.bfloat16


@row("FSDP2", "build on `meta`")
def _meta() -> None:
    with torch.device("meta"):
        built = model()
    net = consistent.parallelize(built, line(), "zero3")
    assert net[0].weight.sbp == (S(0),) and bool(net[0].weight.full().abs().sum() > 0)


@row("FSDP2", "`get_model_state_dict(model")
@row("DDP", "`if rank == 0: torch.save")
def _whole_state() -> None:
    net, path = split("zero3"), shared_folder() / "model.pt"
    state = checkpoint.full_state_dict(net)
    assert bool(state) == (mirrored.current().rank == 0)
    checkpoint.save_full(net, str(path))
    mirrored.current().gather_objects(None, tuple(range(RANKS)))
    same(torch.load(path, weights_only=True)["0.weight"], model()[0].weight)


@row("FSDP2", "`DistributedSampler`")
def _loader() -> None:
    loader = consistent.data.loader(DataLoader(TensorDataset(X), batch_size=4), line())
    ((batch,),) = list(loader)
    assert batch.sbp == (S(0),)
    same(batch, X)


@row(
    "DDP",
    "`DistributedDataParallel(model)`",
    "`model.module`",
    "`find_unused_parameters",
    "gradients",
)
def _data() -> None:
    wanted, net = model(), split("data", inputs=S(0))
    wanted(X).mean().backward()
    rank = mirrored.current().rank
    net(X[rank : rank + 1]).mean().backward()
    same(net[0].weight.grad, wanted[0].weight.grad)
    assert not hasattr(net, "module")
    mirrored.DataParallel(model())(X).mean().backward()


@row("DDP", "`init_process_group`", "`dist.get_rank()`")
@row("Megatron", "`mpu.get_tensor_model_parallel_rank()`")
def _ranks() -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (mirrored.current().rank, RANKS)
    assert mirrored.current().size == RANKS
    assert grid("dp", "tp").coordinate_of(dist.get_rank()) == divmod(dist.get_rank(), 2)


@row("DDP", "`model.no_sync()`")
def _no_sync() -> None:
    net = split("data")
    with consistent.no_sync():
        net(consistent.distribute(X, line(), S(0))).sum().backward()
    assert net[0].weight.grad.sbp == (P,)


@row("DDP", "`SyncBatchNorm")
def _batch_norm() -> None:
    net = consistent.parallelize(nn.BatchNorm1d(8), line(), "data")
    same(net(consistent.distribute(X, line(), S(0))), nn.BatchNorm1d(8)(X))


@row("DDP", "`dist.all_reduce(loss)` for the log")
def _log() -> None:
    net, meter = split("data"), consistent.data.LossMeter()
    loss = net(consistent.distribute(X, line(), S(0))).square().mean()
    meter(loss).backward()
    torch.testing.assert_close(meter.value, loss.item())


@row("Megatron", "`--tensor-model-parallel-size 2`")
def _tensor() -> None:
    net = split({"tp": "tensor"}, grid("dp", "tp"))
    assert net[0].weight.sbp == (B, S(0)) and net[2].weight.sbp == (B, S(1))
    same(net(X), model()(X))


@row("Megatron", "`--pipeline-model-parallel-size 4`", "`--num-layers-per-virtual-pipeline-stage`")
def _pipeline() -> None:
    stages = [consistent.placement("cpu", [rank]) for rank in range(RANKS)]
    for schedule in ("1f1b", "interleaved1f1b"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        wanted = F.mse_loss(net(X), X).item()
        run = consistent.nn.pipeline(
            net, stages, loss=F.mse_loss, micro_batches=4, schedule=schedule
        )
        torch.testing.assert_close(run.step(X, X).item(), wanted)


@row("Megatron", "`--use-distributed-optimizer`")
def _optimizer() -> None:
    for plan in ("zero1", "zero2"):
        net = split(plan)
        optimizer = torch.optim.AdamW(net.parameters())
        net(consistent.distribute(X, line(), S(0))).sum().backward()
        optimizer.step()
        held = optimizer.state[net[0].weight]["exp_avg"]
        assert held.to_local().numel() * RANKS == net[0].weight.numel()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(4, 8, 16)), nn.Parameter(torch.ones(4, 16, 8))

    def forward(self, x: Any) -> Any:
        return (x @ self.up @ self.down).sum(0)


@row("Megatron", "`--expert-model-parallel-size`")
def _experts() -> None:
    net = consistent.parallelize(nn.Sequential(_Experts()), line(), "expert")
    assert net[0].up.sbp == (S(0),)
    same(net(X), _Experts()(X))


@row("Megatron", "`ColumnParallelLinear`", "`copy_to_tensor_model_parallel_region`")
@row("Megatron", "`vocab_parallel_cross_entropy`", "`get_cuda_rng_tracker")
def _layers() -> None:
    torch.manual_seed(0)
    words, to = nn.Embedding(16, 8), nn.Linear(8, 16)
    ids = torch.arange(4)
    wanted = F.cross_entropy(to(words(ids)), ids)
    words = consistent.parallelize(words, line(), {"weight": S(0)})
    to = consistent.parallelize(to, line(), {"weight": S(0), "bias": S(0)})
    logits = to(words(ids))
    assert logits.sbp == (S(1),)
    same(F.cross_entropy(logits, ids), wanted)
    torch.manual_seed(1)
    drawn = consistent.rand(4, 8, placement=line(), sbp=S(0))
    torch.manual_seed(1)
    same(drawn, consistent.rand(4, 8, placement=line(), sbp=B).full())


@row("OneFlow", "`flow.placement(", "`flow.randn(2, 5")
def _flow() -> None:
    assert consistent.placement("cpu", ranks=[0, 1]).size == 2
    sbp = consistent.sbp
    assert (sbp.split(0), sbp.broadcast, sbp.partial_sum) == (S(0), B, P)
    assert consistent.randn(2, 5, placement=line(), sbp=S(0)).shape == (2, 5)


@row("OneFlow", "`x.to_global(placement=, sbp=)` of a global", "`x.to_local()`, `x.is_global`")
@row("OneFlow", "`x.to_global(placement=, sbp=)` of a local")
def _to_global() -> None:
    x = consistent.from_local(X[:1], line(), S(0))
    y = x.to_global(placement=line(), sbp=B)
    assert y.is_global and y.sbp == (B,) and y.placement == line() and y.to_local().shape == (4, 8)


@row("OneFlow", "`model.to_global(placement, sbp)`")
def _model_to_global() -> None:
    assert split({"*": S(0)})[2].bias.sbp == (S(0),)


@row("OneFlow", "`nn.Graph`", "`python3 -m oneflow", "jobs, layers")
def _graph() -> None:
    net = split("data")

    class Graph(consistent.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def build(self, x: Any) -> Any:
            return self.net(x)

    same(Graph()(consistent.distribute(X, line(), S(0))), model()(X))
    assert consistent.flow.__name__ == "consistent.flow"


@row("JAX", "`Mesh(devices", "`NamedSharding", "`PartitionSpec((", "`PartitionSpec()`")
def _shardings() -> None:
    p = grid("data", "model")
    shapes = {(S(0), B): (2, 8), (S(0), S(0)): (1, 8), (B, B): (4, 8)}
    for sbp, shape in shapes.items():
        assert consistent.distribute(X, p, sbp).to_local().shape == shape


@row("JAX", "unreduced values", "`jax.device_put", "`with_sharding_constraint")
def _layouts() -> None:
    x = consistent.distribute(X, line(), S(0))
    assert x.sum(0).sbp == (P,) and x.to_global(sbp=S(1)).sbp == (S(1),)


@row("JAX", "`jax.jit` with shardings")
def _compiled() -> None:
    @consistent.compile
    def double(x: Any) -> Any:
        return x * 2

    same(double(consistent.distribute(X, line(), S(0))), X * 2)


@row("JAX", "`shard_map(f", "`psum`", "one controller process")
def _shard_map() -> None:
    x = consistent.distribute(X, line(), S(0))
    same(consistent.from_local(x.to_local().cumsum(1), line(), S(0)), X.cumsum(1))
    ranks = tuple(range(RANKS))
    same(mirrored.all_reduce(torch.ones(2), ranks), torch.full((2,), 4.0))
    assert mirrored.all_gather(torch.ones(2), 0, [2] * RANKS, ranks).shape == (8,)
    turned = mirrored.all_to_all(torch.ones(4, 4), 0, [1] * RANKS, 1, [4] * RANKS, ranks)
    assert turned.shape == (1, 16)


@row("JAX", "`jax.random.split(key)`")
def _random() -> None:
    drawn = []
    for sbp in (S(0), B):
        torch.manual_seed(0)
        drawn.append(consistent.randn(4, 8, placement=line(), sbp=sbp).full())
    same(drawn[0], drawn[1])
