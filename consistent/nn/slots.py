"""Find where a module holds its tensors, under every name of a tied tensor."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..tensor.global_tensor import GlobalTensor


class Slot(NamedTuple):
    """Place in a module that holds a tensor; a tied tensor has several places.

    Attributes:
        owner: the submodule (or optimizer) that holds the tensor.
        key: its key there, such as ``weight``.
        name: its name in the whole module, such as ``layers.0.fc.weight``.
        value: the tensor.
    """

    owner: torch.nn.Module
    key: str
    name: str
    value: torch.Tensor

    def put(self, value: torch.Tensor) -> None:
        """Replace the parameter or buffer in this place by ``value``."""
        store: Any = (
            self.owner._parameters if self.key in self.owner._parameters else self.owner._buffers
        )
        store[self.key] = value


def plain_slots(module: torch.nn.Module) -> list[list[Slot]]:
    """Return the places of the plain (not global) parameters and buffers of ``module``.

    Each inner list has all places of one tensor, which are several if it is tied:
    ``[[Slot(wte.weight), Slot(head.weight)], [Slot(ln.weight)]]``.

    Raises:
        ValueError: a lazy module has not seen its first input.
        TypeError: a parameter is a DTensor, or a scripted module holds it.
    """
    slots_by_id: dict[int, list[Slot]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, value in [*owner._parameters.items(), *owner._buffers.items()]:
            name = f"{prefix}.{key}" if prefix else key
            if value is None or isinstance(value, GlobalTensor):
                continue
            if _is_dtensor(value):
                raise TypeError(
                    f"parallelize: {name!r} is a DTensor, as fully_shard and torch's tensor "
                    "parallelism make of parameters, and they say already where it lies. Give "
                    'parallelize the module as it was before them, with a plan such as "zero3" '
                    'or "tensor"; of one that is there, make a plain module and load the values: '
                    "plain.load_state_dict(get_model_state_dict(module, "
                    "options=StateDictOptions(full_state_dict=True)))."
                )
            if isinstance(owner, torch.jit.ScriptModule):
                raise TypeError(
                    f"parallelize: {name!r} is held by a scripted or traced module, whose code "
                    "would see this rank's shard only: it reads its tensors in C++, past all that "
                    "knows of layouts. Parallelize the module that it was made of, and leave "
                    "torch.jit.script and torch.jit.trace out; scripted functions and modules "
                    "without tensors may stay."
                )
            if is_lazy(value):
                raise ValueError(
                    f"parallelize: {name!r} has no shape yet, for {type(owner).__name__} takes its "
                    "sizes from its first input. Show it one first, on every rank with the same "
                    "seed: module(sample), and then call parallelize."
                )
            slots_by_id.setdefault(id(value), []).append(Slot(owner, key, name, value))
    return list(slots_by_id.values())


def plain_gradients(tensors: list[list[Slot]]) -> list[list[Slot]]:
    """Return the gradients of the parameters in ``tensors``, each in a list with one ``Slot``.

    The slot names the owner and key of the parameter; its value is the gradient.

    Raises:
        ValueError: a gradient is not strided.
    """
    gradients = []
    for owner, key, name, value in (places[0] for places in tensors):
        if not isinstance(value, torch.nn.Parameter) or value.grad is None:
            continue
        if value.grad.layout is not torch.strided:
            raise ValueError(
                f"parallelize: the gradient of {name!r} is {value.grad.layout}, and only strided "
                "ones become global. Call module.zero_grad() before parallelize."
            )
        gradients.append([Slot(owner, key, f"{name}.grad", value.grad)])
    return gradients


def _is_dtensor(value: torch.Tensor) -> bool:
    # A program that has not imported this module has no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def global_slots(module: torch.nn.Module) -> list[list[Slot]]:
    """Return the places of the global parameters and buffers, one list for each tensor.

    A tied tensor has several places in its list.
    """
    slots_by_id: dict[int, list[Slot]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, value in [*owner._parameters.items(), *owner._buffers.items()]:
            if isinstance(value, GlobalTensor):
                name = f"{prefix}.{key}" if prefix else key
                slots_by_id.setdefault(id(value), []).append(Slot(owner, key, name, value))
    return list(slots_by_id.values())


def plain_attributes(module: torch.nn.Module) -> list[list[Slot]]:
    """Return the places of plain tensors that are neither parameters nor buffers: ``self.x = ...``.

    One list for each tensor. They stay plain, and count as B (replicated) in ops with a global
    tensor.
    """
    slots_by_id: dict[int, list[Slot]] = {}
    for prefix, owner in module.named_modules():
        for key, value in vars(owner).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, GlobalTensor):
                name = f"{prefix}.{key}" if prefix else key
                slots_by_id.setdefault(id(value), []).append(Slot(owner, key, name, value))
    return list(slots_by_id.values())
