"""Runs a step on forked ranks, each watched, and brings back what they have seen.

Ranks are forked, so the step may be any function, one of a notebook or a closure too, and nothing
that it does reaches the calling process.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn.parallelize import parallelize
from ..spec import B, Placement, S, SbpLike
from ..spec.nested import map_tensors
from ..tensor.global_tensor import GlobalTensor
from ..tensor.making.create import distribute
from .watch import Seen, Watch

Step = Callable[[Callable[[nn.Module], nn.Module]], Any]


@dataclass
class World:
    """How a step is run.

    Args:
        ranks: so many processes.
        plan: as ``parallelize`` takes it; None: the model stays as the step made it.
        batch: how the batch lies that the model is given, for each axis; by default it is split
            along dim 0 by the first axis and whole along others.
        double: in float64.
    """

    ranks: int = 1
    plan: Any = None
    grid: tuple[int, ...] | None = None
    batch: SbpLike | None = None
    double: bool = False

    def placement(self) -> Placement:
        """All ranks; the plan's names for axes."""
        plan = self.plan
        axes = tuple(plan) if isinstance(plan, dict) and self.grid and len(self.grid) > 1 else None
        ranks = torch.arange(self.ranks).reshape(self.grid or (self.ranks,)).tolist()
        return Placement("cpu", ranks, axes)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Lay a model out as this world asks."""
        if self.double:
            model = model.double()
            model.register_forward_pre_hook(_as_double, with_kwargs=True)
        if self.plan is None:
            return model
        placement = self.placement()
        batch = self.batch if self.batch is not None else (S(0),) + (B,) * (placement.ndim - 1)

        def lay_out(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            def laid(x: Tensor) -> Tensor:
                plain = not isinstance(x, GlobalTensor) and x.ndim
                return distribute(x, placement, batch) if plain else x

            return map_tensors((args, kwargs), laid)

        model = parallelize(model, placement, self.plan)
        model.register_forward_pre_hook(lay_out, with_kwargs=True, prepend=True)
        return model


@dataclass
class Ran:
    """What the ranks of a world have seen; or the error that ended it."""

    seen: list[list[Seen]]
    draws: bool = False
    error: str = ""


def run(step: Step, world: World, seconds: float) -> Ran:
    """Run ``step`` in a world of its own processes, for no more than so many seconds."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _port()
        ranks = [
            fork.Process(target=_rank, args=(step, world, rank, folder, port), daemon=True)
            for rank in range(world.ranks)
        ]
        for rank in ranks:
            rank.start()
        late = _wait(ranks, time.monotonic() + seconds)
        errors = [Path(folder, f"error{k}") for k in range(world.ranks)]
        error = next((path.read_text() for path in errors if path.exists()), "")
        if late:
            error = f"not ended after {seconds:g} s"
        elif not error and any(rank.exitcode for rank in ranks):
            error = f"ranks ended with {[rank.exitcode for rank in ranks]}"
        files = [Path(folder, str(k)) for k in range(world.ranks)]
        if not all(path.exists() for path in files):
            return Ran([], error=error or "a rank has left nothing")
        found = [torch.load(path, weights_only=False) for path in files]
    return Ran([seen for seen, _ in found], any(draws for _, draws in found), error)


def _wait(ranks: list[Any], end: float) -> bool:
    """Whether the time ended first. A rank that fails ends all, for others would wait for it."""
    try:
        while any(rank.is_alive() for rank in ranks):
            if any(rank.exitcode for rank in ranks):
                time.sleep(0.5)  # those that fail too may still say why
                return False
            if time.monotonic() > end:
                return True
            time.sleep(0.02)
        return False
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _rank(step: Step, world: World, rank: int, folder: str, port: int) -> None:
    try:
        torch.set_num_threads(1)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world.ranks), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        if world.ranks > 1 or world.plan is not None:
            dist.init_process_group("gloo", rank=rank, world_size=world.ranks)
        if world.double:
            _no_autocast()
        watch = Watch(world.prepare)
        try:
            with watch.watching():
                watch.finish(step(watch.place))
        finally:  # what was seen before an error may say where it came from
            torch.save((watch.seen, watch.draws), Path(folder, str(rank)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _as_double(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    def wide(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    return map_tensors((args, kwargs), wide)


def _no_autocast() -> None:
    """In this process, which ends with the step, casts to fewer bits are left out."""
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *given: False  # type: ignore[method-assign]


def _port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]
