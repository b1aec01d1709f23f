"""One training step of a model under a plan, beside the same step of one process."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import torch

import consistent
from consistent import Placement, S
from mirrored.transports.counting import counting
from tests.models import others
from tests.models.architectures import DIM, INNER, LAYERS, MODELS, SINGLE
from tests.rounding import gamma

RATE = 0.1


def step(model: torch.nn.Module, inputs: dict[str, Any], watched: Any = None) -> dict[str, Any]:
    """Loss, gradients, and loss after a step of SGD, which runs inside ``watched``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with watched or nullcontext():
        loss = _loss(model(**inputs))
        loss.backward()
        found = {f"grad {name}": p.grad for name, p in model.named_parameters()}
        kept = {k: None if g is None else g.detach().clone() for k, g in found.items()}
        optimizer.step()
    with torch.no_grad():
        after = _loss(model(**inputs))
    return {"loss": loss.detach(), **kept, "loss after": after.detach()}


def _loss(out: Any) -> torch.Tensor:
    return out["loss"]


def alone(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The step of one process."""
    return step(*made(name, device, dtype))


def made(
    name: str, device: str, dtype: torch.dtype | None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(model, inputs) there; with another dtype than their own, if one is given."""
    model, inputs = (MODELS.get(name) or others.OTHERS[name])()

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() else None)

    return model.eval().to(device, dtype), {key: move(x) for key, x in inputs.items()}


def laid_out(
    name: str,
    plan: Any,
    placement: Placement,
    part: bool,
    keep_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",  # of the model; tests lay it out on ranks that only believe to have GPUs
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(model, inputs) under a plan; ``part``: each rank passes its part of the batch."""
    model, inputs = made(name, device, dtype)
    model = consistent.parallelize(model, placement, plan, keep_bytes=keep_bytes)
    if part:
        inputs = {
            key: consistent.distribute(x, placement, (S(0), *[consistent.B] * (placement.ndim - 1)))
            if isinstance(x, torch.Tensor)
            else x
            for key, x in inputs.items()
        }
    return model, inputs


def under(
    name: str, plan: Any, placement: Placement, part: bool, **more: Any
) -> tuple[Watched, dict[str, Any]]:
    """(what was watched, the step of ``laid_out``, which takes ``more``)."""
    return watched_step(*laid_out(name, plan, placement, part, **more))


def watched_step(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Watched, dict[str, Any]]:
    """(what was watched, the step of a model that is laid out)."""
    watched = Watched()
    with consistent.plain_may_differ():  # comparing plain tensors is not part of a step
        found = step(model, inputs, watched)
    return watched, found


class Watched:
    """A report, and a count of what is sent, of a block that is elsewhere."""

    def __enter__(self) -> None:
        self._contexts = ExitStack()
        self.report = self._contexts.enter_context(consistent.report())
        self._counted = self._contexts.enter_context(counting())

    def __exit__(self, *why: Any) -> None:
        self._contexts.close()

    @property
    def bytes(self) -> int:
        """The bytes that this rank has sent."""
        return self._counted.bytes


def allowed(name: str) -> float:
    """The difference, relative to the largest element, that rounding may make of a model's step. In
    a model that takes no float64 a term passes the products of all its layers."""
    single = name in SINGLE or name.partition(" ")[2] in others.SINGLE
    return gamma(LAYERS * (4 * DIM + 2 * INNER), torch.float32) if single else 1e-5


def worst(found: dict[str, Any], wanted: dict[str, Any], least: float = 1e-6) -> tuple[str, float]:
    """The largest difference, relative to the largest element, and where it is. Where that element
    is less than ``least``, as in a gradient that is 0 but for rounding, relative to ``least``."""
    errors = {key: _error(found[key], wanted[key], least) for key in wanted}
    key = max(errors, key=lambda k: errors[k])
    return key, errors[key]


def _error(ours: Any, plain: Any, least: float) -> float:
    if ours is None or plain is None:
        return 0.0 if ours is plain else float("inf")
    value = ours.full() if isinstance(ours, consistent.GlobalTensor) else ours
    if not bool(torch.isfinite(plain).all()):
        return 0.0 if torch.equal(value.isfinite(), plain.isfinite()) else float("inf")
    scale = plain.abs().max().clamp_min(least)
    return float((value - plain).abs().max() / scale)
