"""What ranks of two hosts do when the link between them is cut or slow: every move of the
transport, and steps of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import consistent
from consistent import Placement, S
from mirrored import current
from mirrored.comm import Transport
from tests.faults.link import Fate
from tests.faults.setting import Setting

LARGE = 100_000  # numbers of a rank's part

Moved = list[Any]


def moves(t: Transport, n: int) -> dict[str, Callable[[], Moved]]:
    """Every move, of some bytes or of 400 KB of each rank."""
    rank, ranks = t.rank, tuple(range(n))
    x = torch.arange(float(LARGE)).view(-1, 4) + rank
    rows, columns = [x.shape[0]] * n, [4] * n
    cut = [x.shape[0] // n] * (n - 1) + [x.shape[0] - x.shape[0] // n * (n - 1)]
    parts, own = list(x.split(cut)), cut[rank]
    mine = [(own, 4)] * n
    after, before = (rank + 1) % n, (rank - 1) % n

    def peers() -> Moved:
        with t.peers(x, ranks) as views:
            return [view.clone() for view in views]

    def addends() -> Moved:
        with t.addends(x, 0, cut, ranks) as (xs, start):
            return [torch.stack(xs).sum(0)[start : start + own]]

    def messages() -> Moved:
        going = t.send(x, after, "x")
        come = t.receive(x.shape, x.dtype, before, "x", "cpu").wait()
        going.wait()
        return [come]

    return {
        "short sum": lambda: [t.all_reduce(x[:2], ranks)],
        "sum": lambda: [t.all_reduce(x, ranks)],
        "sum begun": lambda: [t.all_reduce_async(x.clone(), ranks).wait()],
        "all_gather": lambda: t.all_gather(x, [x.shape] * n, ranks),
        "all_to_all": lambda: t.all_to_all(parts, mine, ranks),
        "all_to_all begun": lambda: t.start_all_to_all(parts, mine, ranks).wait(),
        "broadcast": lambda: [t.broadcast(x, x.shape, x.dtype, "cpu", n - 1, ranks)],
        "exchange": lambda: t.exchange([(after, x)], [(before, x.shape, x.dtype)], ranks),
        "messages": messages,
        "objects": lambda: t.gather_objects("x" * LARGE, ranks),
        "notes": lambda: t.gather_notes(b"x" * LARGE if rank else b"", ranks),
        "sum with notes": lambda: [t.all_reduce_with_notes(x[:2], ranks, ranks)[1]],
        "all_gather_into_tensor": lambda: [t.all_gather_into_tensor(x, 0, rows, ranks)],
        "joins": lambda: t.all_gather_several([x, x], [0, 1], [rows, columns], ranks),
        "joins begun": lambda: t.start_all_gather_several(
            [x, x], [0, 0], [rows, rows], ranks
        ).wait(),
        "cut": lambda: [t.reduce_scatter(x, 0, cut, ranks)],
        "cuts": lambda: t.reduce_scatter_several([x, x], [0, 0], [cut, cut], ranks),
        "cuts begun": lambda: t.start_reduce_scatter_several(
            [x, x], [0, 0], [cut, cut], ranks
        ).wait(),
        "all_to_all_single": lambda: [t.all_to_all_single(x, 0, cut, 1, columns, ranks)],
        "peers": peers,
        "addends": addends,
    }


def training(setting: Setting, plan: str) -> Callable[[], Moved]:
    torch.manual_seed(0)
    placement = Placement("cpu", setting.ranks)
    made = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    net = consistent.parallelize(made, placement, plan=plan)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    x = consistent.distribute(torch.ones(12, 64), placement, S(0))

    def step() -> Moved:
        sgd.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        sgd.step()
        return [loss.item()]

    return step


def saving(setting: Setting, folder: str) -> Callable[[], Moved]:
    """A checkpoint that is written while the program goes on."""
    placement = Placement("cpu", setting.ranks)
    net = consistent.parallelize(nn.Linear(4, 4), placement, plan="zero3")

    def save() -> Moved:
        consistent.checkpoint.save(f"{folder}/saved", model=net, wait=False)
        consistent.checkpoint.wait()
        return []

    return save


PLANS = ("data", "zero3", "tensor")
MOVES = tuple(moves(current(), 1))
BEFORE, ALL, SAVE = "before all", "all", "checkpoint"
ROUNDS = 3  # of a program: the link is cut in one of them


def run(name: str, rank: int, n: int, fate: Fate, folder: str) -> list[Any]:
    """What a program tells of its values on this rank. `fate` begins once all ranks have met."""
    if name == BEFORE:
        _meet(folder, rank, n)
        fate.begin()
        return [Setting(rank, n).step()]
    setting = Setting(rank, n)
    if name == SAVE:
        call = saving(setting, folder)
    elif name in PLANS:
        call = training(setting, name)
    elif name == ALL:
        calls = [*moves(current(), n).values(), *(training(setting, plan) for plan in PLANS)]
        call = lambda: [x for each in calls for x in each()]  # noqa: E731
    else:
        call = moves(current(), n)[name]
    fate.begin()
    for _ in range(1 if name == ALL else ROUNDS):
        found = call()
    return [_told(x) for x in found]


def _meet(folder: str, rank: int, n: int) -> None:
    """Return once all ranks are here, by files."""
    Path(folder, f"here-{rank}").touch()
    while not all(Path(folder, f"here-{k}").exists() for k in range(n)):
        time.sleep(0.01)


def _told(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double().sum().item()
    return len(x) if isinstance(x, (str, bytes)) else x
