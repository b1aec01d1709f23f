"""Steps with faults that people made: under plans, by hand as DDP does, and over DTensor.

Each is a function of `place` and the words that name its kind. The right steps are beside them.
They are module-level functions and partials of them, which a spawned process can import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import consistent
from consistent import B, GlobalTensor, P, S

Place = Callable[[nn.Module], nn.Module]
ROWS, WIDTH = 8, 6


class Net(nn.Module):
    """`changed` sees what lies between the two layers, and gives what takes its place."""

    def __init__(self, changed: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, 4)
        self.changed = changed

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.changed(F.gelu(self.up(x))))


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=random), torch.randint(4, (ROWS,), generator=random)


def step(place: Place, net: Callable[[], nn.Module] = Net, lr: float = 0.1) -> list[Tensor]:
    """Two steps of SGD on one process."""
    torch.manual_seed(0)
    model, losses = place(net()), []
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for seed in (1, 2):
        x, y = batch(seed)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


# ---- under plans --------------------------------------------------------------------------------


def _if_global(change: Callable[[GlobalTensor], Tensor], h: Tensor) -> Tensor:
    return change(h) if isinstance(h, GlobalTensor) else h


def _changed(change: Callable[[GlobalTensor], Tensor]) -> Callable[[Place], Any]:
    return partial(step, net=partial(Net, partial(_if_global, change)))


def _relaid(x: GlobalTensor, sbp: Any, value: Tensor | None = None) -> GlobalTensor:
    return consistent.from_local(x.to_local() if value is None else value, x.placement, sbp)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _whole_as_addend(h: GlobalTensor) -> Tensor:
    return _relaid(h.to_global(sbp=B), P)


def _addend_as_whole(h: GlobalTensor) -> Tensor:
    return _relaid(h.to_global(sbp=P), B)


def _shard_as_whole(h: GlobalTensor) -> Tensor:
    return _relaid(h, B)


def _of_one_rank(h: GlobalTensor) -> Tensor:
    half = h.full()[: h.to_local().shape[0]]
    return _relaid(h, S(0), half)


def _shuffled(h: GlobalTensor) -> Tensor:
    return _relaid(h, S(0), h.to_local().flip(0))


def _dropped(h: GlobalTensor) -> Tensor:
    kept = torch.rand(h.to_local().shape, generator=torch.Generator().manual_seed(_rank())) < 0.5
    return _relaid(h, S(0), h.to_local() * kept)


def _divided(h: GlobalTensor) -> Tensor:
    return h / h.placement.size


def _not_finite(h: GlobalTensor) -> Tensor:
    return _relaid(h, S(0), h.to_local() / (0.0 if _rank() else 1.0))


def _negated(h: GlobalTensor) -> Tensor:
    return h.neg()


def _detached(h: GlobalTensor) -> Tensor:
    return h.detach() + 0 * h


OURS: dict[str, tuple[Callable[[Place], Any], str]] = {
    "whole as addend": (_changed(_whole_as_addend), "2 times"),
    "addend as whole": (_changed(_addend_as_whole), "addend"),
    "shard as whole": (_changed(_shard_as_whole), "shard"),
    "batch of one rank": (_changed(_of_one_rank), "rows are right"),
    "rows in another order": (_changed(_shuffled), "another order"),
    "other random numbers": (_changed(_dropped), "random numbers"),
    "wrong divisor": (_changed(_divided), "1/2"),
    "not finite": (_changed(_not_finite), "not finite"),
    "wrong sign": (_changed(_negated), "sign"),
    "missing gradient": (_changed(_detached), "missing"),
}

# ---- by hand ------------------------------------------------------------------------------------

Sum = Callable[[str, Tensor], None]  # of one parameter's gradient


def mean_over_ranks(name: str, gradient: Tensor) -> None:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def by_hand(
    place: Place,
    reduce: Sum = mean_over_ranks,
    part: Callable[[Tensor], Tensor] = lambda x: x.chunk(dist.get_world_size())[dist.get_rank()],
    seed: int = 0,
    stepping: Callable[[int, Any], None] = lambda k, optimizer: optimizer.step(),
    clear: bool = True,
) -> list[Tensor]:
    """Data parallelism as people write it."""
    torch.manual_seed(seed)
    model, losses = place(Net()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k in (1, 2):
        x, y = map(part, batch(k))
        loss = F.cross_entropy(model(x), y)
        if clear:
            optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            reduce(name, p.grad)
        stepping(k, optimizer)
        losses.append(loss.detach())
    return losses


def _only_summed(name: str, gradient: Tensor) -> None:
    dist.all_reduce(gradient)


def _one_left_out(name: str, gradient: Tensor) -> None:
    if name != "down.bias":
        mean_over_ranks(name, gradient)


def _divided_twice(name: str, gradient: Tensor) -> None:
    mean_over_ranks(name, gradient)
    gradient /= dist.get_world_size()


def _zeroed(name: str, gradient: Tensor) -> None:
    mean_over_ranks(name, gradient)
    gradient *= name != "up.weight"


def _by_one_rank(name: str, gradient: Tensor) -> None:
    dist.broadcast(gradient, 0)


def _only_where_called(name: str, gradient: Tensor) -> None:
    summed = gradient.clone()
    mean_over_ranks(name, summed)
    if dist.get_rank() == 0:
        gradient.copy_(summed)


def _skipped(k: int, optimizer: Any) -> None:
    """A group left out: its optimizer's step does not reach the last parameter."""
    last = optimizer.param_groups[0]["params"].pop() if k == 2 else None
    optimizer.step()
    if last is not None:
        optimizer.param_groups[0]["params"].append(last)


def _part_of_rank_0(x: Tensor) -> Tensor:
    return x.chunk(2)[0]


def _other_part(x: Tensor) -> Tensor:
    return x.chunk(2)[dist.get_rank()].roll(1, 0) if x.ndim > 1 else x.chunk(2)[dist.get_rank()]


BY_HAND: dict[str, tuple[Callable[[Place], Any], str]] = {
    "summed, not averaged": (partial(by_hand, reduce=_only_summed), "2 times"),
    "one gradient left out": (partial(by_hand, reduce=_one_left_out), "own part"),
    "divided twice": (partial(by_hand, reduce=_divided_twice), "1/2"),
    "gradient missing": (partial(by_hand, reduce=_zeroed), "missing"),
    "gradient of rank 0": (partial(by_hand, reduce=_by_one_rank), "other values"),
    "reduced on one rank": (
        partial(by_hand, reduce=_only_where_called),
        "right on rank 0 only",
    ),
    "optimizer skips one": (partial(by_hand, stepping=_skipped), "stale"),
    "all ranks have one part": (partial(by_hand, part=_part_of_rank_0), "shard"),
    "inputs not beside labels": (partial(by_hand, part=_other_part), "another order"),
    "gradients not cleared": (partial(by_hand, clear=False), "not cleared"),
}

# ---- over DTensor -------------------------------------------------------------------------------


def over_dtensor(place: Place, faulty: str = "") -> list[Tensor]:
    """Columns and rows, with shards made by hand where DTensor has no say."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh, n = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    model, losses = place(Net()), []

    def laid(x: Tensor, placement: Any) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]))

    columns, rows = Shard(0), Shard(1)
    model.up.weight, model.up.bias = laid(model.up.weight, columns), laid(model.up.bias, columns)
    model.down.weight = laid(model.down.weight, rows)
    model.down.bias = laid(model.down.bias, Replicate())

    def between(h: Any) -> Any:
        local = h.to_local()
        if faulty == "shard as replicated":
            first = DTensor.from_local(
                h.full_tensor()[:, : 12 // n].repeat(1, n), mesh, [Replicate()]
            )
            return first.redistribute(placements=[rows])
        if faulty == "whole as partial":
            return DTensor.from_local(h.full_tensor(), mesh, [Partial()]).redistribute(
                placements=[rows]
            )
        if faulty == "partial as replicated":
            addend = h.redistribute(placements=[Replicate()]).to_local() / n
            return DTensor.from_local(addend, mesh, [Replicate()]).redistribute(placements=[rows])
        if faulty == "wrong sign":
            return DTensor.from_local(-local, mesh, [rows])
        if faulty == "zeros":
            return DTensor.from_local(local * 0, mesh, [rows])
        if faulty == "not finite":
            return DTensor.from_local(local / 0, mesh, [rows])
        if faulty == "ranks in another order":
            whole = h.full_tensor().roll(1, 0)
            return DTensor.from_local(whole.chunk(n, 1)[dist.get_rank()], mesh, [rows])
        return h

    model.changed = between
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in (1, 2):
        x, y = batch(seed)
        whole = [distribute_tensor(t, mesh, [Replicate()]) for t in (x, y)]
        out = model(whole[0]).redistribute(placements=[Replicate()])
        loss = F.cross_entropy(out, whole[1])
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if faulty == "gradient doubled" and name == "up.weight":
                p.grad = p.grad * 2
            if faulty == "gradient of one rank" and name == "up.weight":
                p.grad = DTensor.from_local(
                    p.grad.to_local() * (dist.get_rank() == 0), mesh, [columns]
                )
            if faulty == "divided by ranks" and name == "down.weight":
                p.grad = p.grad / n
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _over(faulty: str) -> Callable[[Place], Any]:
    return partial(over_dtensor, faulty=faulty)


OVER_DTENSOR: dict[str, tuple[Callable[[Place], Any], str]] = {
    name: (_over(name), words)
    for name, words in {
        "shard as replicated": "slices along dim 1",
        "whole as partial": "2 times",
        "partial as replicated": "1/2",
        "wrong sign": "sign",
        "zeros": "missing",
        "not finite": "not finite",
        "ranks in another order": "another order",
        "gradient doubled": "2 times",
        "gradient of one rank": "rows are right",
        "divided by ranks": "1/2",
    }.items()
}
