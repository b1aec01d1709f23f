"""Run a step on ranks of its own, each of which records the tensors that it computes.

Ranks are forked where possible (``start_method``), so the step may be any function, also a closure
or one of a notebook. Nothing that the step does affects the calling process.
"""

from __future__ import annotations

import multiprocessing
import os
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
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..nn.parallelize import parallelize
from ..spec import B, Placement, S, SbpLike
from ..spec.nested import map_tensors
from ..tensor.global_tensor import GlobalTensor
from ..tensor.making.create import distribute
from .start_method import start_method
from .watch import RecordedTensor, StepRecorder

Step = Callable[[Callable[[nn.Module], nn.Module]], Any]


@dataclass
class StepSetting:
    """How a step runs: the number of ranks, the plan, and the layout of the batch.

    Args:
        ranks: the number of processes.
        plan: as ``parallelize`` takes it; None leaves the model as the step made it.
        grid: the shape of the placement; one axis if None.
        batch: the layout that the model's batch gets, for each axis; by default it is split along
            dim 0 by the first axis and whole along others.
        double: run in float64.
    """

    ranks: int = 1
    plan: Any = None
    grid: tuple[int, ...] | None = None
    batch: SbpLike | None = None
    double: bool = False

    def placement(self) -> Placement:
        """Return the placement of all ranks, with axes named as in the plan."""
        plan = self.plan
        axes = tuple(plan) if isinstance(plan, dict) and self.grid and len(self.grid) > 1 else None
        ranks = torch.arange(self.ranks).reshape(self.grid or (self.ranks,)).tolist()
        return Placement("cpu", ranks, axes)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with the plan applied, and in float64 if ``double``.

        Plain tensors that are passed to it then become global, in the layout of the batch.
        """
        if self.double:
            model = model.double()
            model.register_forward_pre_hook(_convert_to_double, with_kwargs=True)
        if self.plan is None:
            return model
        placement = self.placement()
        batch = self.batch if self.batch is not None else (S(0),) + (B,) * (placement.ndim - 1)

        def lay_out(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            def distribute_plain(x: Tensor) -> Tensor:
                is_plain = not isinstance(x, GlobalTensor) and x.ndim
                return distribute(x, placement, batch) if is_plain else x

            return map_tensors((args, kwargs), distribute_plain)

        model = parallelize(model, placement, self.plan)
        model.register_forward_pre_hook(lay_out, with_kwargs=True, prepend=True)
        return model


@dataclass
class RunResult:
    """What a run of the step left: the tensors recorded by each rank, and how it ended.

    Attributes:
        seen: the tensors of each rank.
        draws: whether the step draws random numbers.
        error: the error that ended the run; "" if it ended well.
        seconds: the time that it took.
    """

    seen: list[list[RecordedTensor]]
    draws: bool = False
    error: str = ""
    seconds: float = 0.0


def run(step: Step, world: StepSetting, limit: float) -> RunResult:
    """Run ``step`` on new ranks, as ``world`` says, and return what they recorded.

    The ranks are processes that are ended if they take more than ``limit`` seconds.

    Raises:
        RuntimeError: ranks can neither be forked nor import ``step``.
    """
    method, start = start_method(step), time.monotonic()
    processes: Any = multiprocessing.get_context(method)
    if method == "fork":
        _import_before_fork()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(target=_run_rank, args=(step, world, rank, folder), daemon=True)
            for rank in range(world.ranks)
        ]
        for rank in ranks:
            rank.start()
        timed_out = _wait_until(ranks, start + limit)
        error = f"not ended after {limit:.3g} s" if timed_out else _error_text(ranks, Path(folder))
        files = [Path(folder, str(k)) for k in range(world.ranks)]
        if not all(path.exists() for path in files):
            return RunResult([], error=error or "a rank has left nothing")
        records = [torch.load(path, weights_only=False) for path in files]
    seen, draws = [seen for seen, _ in records], any(draws for _, draws in records)
    return RunResult(seen, draws, error, time.monotonic() - start)


def _import_before_fork() -> None:
    """Import what torch imports when an op first runs on meta tensors, before ranks are forked."""
    import torch._dynamo.utils
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def _error_text(ranks: list[Any], folder: Path) -> str:
    """Return the traceback of the first rank that raised, else the exit codes if ranks failed.

    Returns "" if all ranks ended well. ``folder`` has the files with tracebacks.
    """
    errors = [folder / f"error{k}" for k in range(len(ranks))]
    codes = [rank.exitcode for rank in ranks]
    text = next((path.read_text() for path in errors if path.exists()), "")
    return text or (f"ranks ended with {codes}" if any(codes) else "")


def _wait_until(ranks: list[Any], end: float) -> bool:
    """Wait for the processes ``ranks``; return whether they still ran at ``end`` (monotonic time).

    If a rank fails, all are killed, because the other ranks would wait for it forever.
    """
    try:
        while any(rank.is_alive() for rank in ranks):
            if any(rank.exitcode for rank in ranks):
                time.sleep(0.5)  # other ranks that fail may still write their errors
                return False
            if time.monotonic() > end:
                return True
            time.sleep(0.02)
        return False
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _run_rank(step: Step, world: StepSetting, rank: int, folder: str) -> None:
    """Run ``step`` in this process as ``rank``; leave records, or a traceback, in ``folder``."""
    try:
        torch.set_num_threads(1)
        if world.ranks > 1 or world.plan is not None:
            _join_group(rank, world.ranks, Path(folder))
        if world.double:
            _disable_autocast()
        recorder = StepRecorder(world.prepare, world.double)
        try:
            with recorder.watching():
                recorder.finish(step(recorder.place))
        finally:  # tensors from before an error may show its cause
            torch.save((recorder.seen, recorder.draws), Path(folder, str(rank)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _join_group(rank: int, ranks: int, folder: Path) -> None:
    """Start the process group of the forked ranks, as torchrun does.

    Rank 0 listens at a port that the system chooses, and leaves its number in a file for the
    others.
    """
    path = folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        # Renamed after writing, so that no rank reads half a number.
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.01)
        store = TCPStore("127.0.0.1", int(path.read_text()), ranks, is_master=False)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
    }  # fmt: skip
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def _convert_to_double(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Convert the arguments of a model to float64; a hook before its forward."""

    def wide(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    return map_tensors((args, kwargs), wide)


def _disable_autocast() -> None:
    """Disable autocast for the rest of this process, so that a float64 run stays in float64."""
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *given: False  # type: ignore[method-assign]
