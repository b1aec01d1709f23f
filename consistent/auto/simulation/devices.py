"""World size and devices that a program finds while it is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...spec import World
from ...spec.tracer import Tracer


class SimulatedWorld(World):
    """World of ``ranks`` ranks, with or without GPUs, against which placements are checked.

    It replaces the real world, so it does not matter what this machine has.
    """

    def __init__(self, ranks: int, gpus: bool) -> None:
        self._ranks, self._gpus = ranks, gpus

    def size(self) -> int | None:
        return self._ranks

    def has_gpus(self) -> bool:
        return self._gpus


@contextmanager
def simulated_world(ranks: int, gpus: bool) -> Iterator[None]:
    """Let a program find a world of ``ranks`` ranks inside the ``with`` block.

    Placements are checked against it. If ``gpus``, the world has GPUs, and autocast for GPUs
    becomes autocast for the CPU, since the tensors of a simulation are CPU tensors.
    """
    autocast: Any = torch.amp.autocast_mode.autocast
    original_init = autocast.__init__

    def init_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    world = SimulatedWorld(ranks, gpus)
    try:
        if gpus:
            autocast.__init__ = init_on_cpu
        with Tracer(world=lambda: world).tracing():
            yield
    finally:
        autocast.__init__ = original_init


class OnCpu(TorchFunctionMode):
    """Torch function mode that keeps on the CPU what a program would move to or make on a GPU.

    The tensors of a simulation are CPU tensors, also where it simulates GPUs.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")
