"""Training steps on ranks that believe to have GPUs, and what they ask of them."""

from __future__ import annotations

from typing import Any

import torch

import consistent
from consistent import Placement
from consistent.nn import pipeline
from tests.models.architectures import MODELS
from tests.models.messages import PLANS
from tests.models.steps import RATE, laid_out
from tests.streams.noted import Event
from tests.streams.stand_ins import on_a_gpu

STEPS = {"eager": 2, "compiled": 4}  # compiled: as written, recorded, and twice as a program
MICRO_BATCHES = 3


def events(rank: int, name: str, plan: str, how: str, peers: bool = False) -> list[Event]:
    """Of steps of a model under a plan, by all ranks, "eager" or "compiled"."""
    with on_a_gpu(peers) as log:
        given, part, keep_bytes = PLANS[plan]
        everyone = Placement("cuda", range(torch.distributed.get_world_size()))
        model, inputs = laid_out(name, given, everyone, part, keep_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step(**inputs: Any) -> Any:
            optimizer.zero_grad()
            loss = model(**inputs)["loss"]
            loss.backward()
            optimizer.step()
            return loss

        run: Any = step
        if how == "compiled":
            telling = "Mamba" not in name  # asks for a scan that runs under torch's tracer only
            run = consistent.compile(
                step, backend="ops", fullgraph=True, overlap=True, tell_compiling=telling
            )
        with consistent.plain_may_differ():  # comparing plain tensors is not part of a step
            for _ in range(STEPS[how]):
                run(**inputs)
        return list(log.events)


def piped(rank: int, name: str, plan: str) -> list[Event]:
    """Of steps of a model in two stages, each on two ranks under a plan."""
    with on_a_gpu() as log:
        model, inputs = MODELS[name]()
        for module in model.modules():
            if (config := getattr(module, "config", None)) is not None:
                config.use_cache = False  # it would be one object for all micro-batches
        stages = [Placement("cuda", [0, 1]), Placement("cuda", [2, 3])]
        pipe = pipeline(
            model.eval(), stages, micro_batches=MICRO_BATCHES, plan=plan,
            loss=lambda out, _: out["loss"],
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipe.model.parameters(), lr=RATE)
        for _ in range(STEPS["eager"]):
            optimizer.zero_grad()
            pipe.step(inputs, inputs.get("labels", next(iter(inputs.values()))))
            optimizer.step()
        return list(log.events)
