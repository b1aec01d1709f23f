"""Pipelines: how gradients of micro-batches are scaled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import consistent

from .models import filled
from .report import report
from .worlds import World, integers, rand

PARTS = 4  # micro-batches


def _model() -> Any:
    return filled(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)))


def _batch(seed: int = 0) -> Any:
    return rand(8, 4, seed=seed), integers(3, 8, seed=seed)


def _staged(batches: int, scale: bool) -> Any:
    """Gradients of both stages by torch's schedule, on every rank."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, model = dist.get_rank(), _model()
    stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PARTS, loss_fn=F.cross_entropy, scale_grads=scale)
    for k in range(batches):
        x, y = _batch(k)
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
    for part, p in [(k, p) for k in (0, 1) for p in model[k].parameters()]:
        p.grad = torch.zeros_like(p) if part != rank else p.grad
        dist.broadcast(p.grad, part)
    return [p.grad for p in model.parameters()]


def _accumulated(w: World, batches: int) -> Any:
    model = _model()
    if type(w) is World:
        for k in range(batches):
            x, y = _batch(k)
            F.cross_entropy(model(x), y).backward()
        return [p.grad for p in model.parameters()]
    stages = [consistent.placement("cpu", [0]), consistent.placement("cpu", [1])]
    pipe = consistent.nn.pipeline(
        model, stages, ["1"], loss=F.cross_entropy, micro_batches=PARTS, schedule="gpipe"
    )
    for k in range(batches):
        pipe.step(*_batch(k))
    return [p.grad for p in model.parameters()]


@report(
    "pytorch/torchtitan", 2972, "PP and non-PP produce differently scaled gradients",
    said="the schedule goes backward from a loss that was not divided",
    there=lambda w: _staged(1, scale=False),
)  # fmt: skip
def gradients_of_micro_batches(w: World) -> Any:
    return _accumulated(w, 1)


@report(
    "pytorch/torchtitan", 1733, "Gradient accumulation broken in PP",
    said="each step divides what was accumulated before once more",
    there=lambda w: _staged(2, scale=True),
)  # fmt: skip
def gradients_accumulated_over_steps(w: World) -> Any:
    return _accumulated(w, 2)
