"""A training step of a model as a program, beside the same step as it is written."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import consistent
from consistent import Placement, S
from mirrored.transports.counting import counting
from tests.models.architectures import MODELS
from tests.models.steps import worst


class Compared(NamedTuple):
    """Of one model under one plan.

    Args:
        error: the largest difference of losses and gradients, relative to the largest element.
        messages: that the program sends.
        written, recorded: bytes that this rank sends in a step, as written and as a program.
        saved: the passes that left messages out.
        why: there is no program; the rest is not known.
    """

    error: float = 0.0
    messages: int = 0
    written: int = 0
    recorded: int = 0
    saved: tuple[str, ...] = ()
    why: str = ""


def _made(name: str, plan: str) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    p = Placement.all("cpu")
    model, inputs = MODELS[name]()
    # Nothing is kept, as of large models: these are so small that all of them would be.
    consistent.parallelize(model.eval(), p, plan, keep_bytes=0)
    if plan != "tensor":
        inputs = {
            k: consistent.distribute(x, p, S(0)) if isinstance(x, torch.Tensor) else x
            for k, x in inputs.items()
        }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**inputs: Any) -> Any:
        optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        return loss

    return model, inputs, step


def _found(model: torch.nn.Module, losses: list[Any]) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {**{f"loss {i}": x.detach() for i, x in enumerate(losses)}, **gradients}


def compared(name: str, plan: str) -> Compared:
    """Three steps of SGD each way: as written, recorded, and as a program."""
    model, inputs, step = _made(name, plan)
    losses = [step(**inputs) for _ in range(2)]
    with counting() as eager:
        losses.append(step(**inputs))
    wanted = {k: None if x is None else x.full() for k, x in _found(model, losses).items()}
    model, inputs, step = _made(name, plan)
    # Mamba asks for torch's own scan where it is compiled, which runs under torch's tracer only.
    telling = "Mamba" not in name
    program = consistent.compile(step, backend="ops", fullgraph=True, tell_compiling=telling)
    try:
        losses = [program(**inputs) for _ in range(2)]
    except consistent.CannotRecord as error:
        return Compared(why=str(error).splitlines()[0])
    with counting() as recorded:
        losses.append(program(**inputs))
    _, error = worst(_found(model, losses), wanted)
    (made,) = program.programs
    saved = sorted({x.why.partition(":")[0] for x in made.program.saved})
    messages = len(made.program.messages())
    return Compared(error, messages, _sent(eager), _sent(recorded), tuple(saved))


def _sent(counted: Any) -> int:
    """Bytes of tensors; objects are what ranks compare where they plan."""
    return sum(call.bytes for call in counted.calls if call.name != "gather_objects")
