"""Where a program runs: on one process, on ranks with this library, on ranks with DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import consistent
from consistent import P
from consistent.spec import Sbp, Split


class World:
    """What a program asks for. Here: that of one process, where a layout says nothing."""

    def lay(self, value: Tensor, sbp: Sbp) -> Any:
        """A tensor that every rank has whole, laid out."""
        return value

    def leaf(self, value: Tensor, sbp: Sbp) -> Any:
        """The same, with a gradient."""
        return self.lay(value.clone(), sbp).requires_grad_()

    def relay(self, x: Any, sbp: Sbp) -> Any:
        """The same tensor in another layout."""
        return x

    def model(self, model: nn.Module, plan: Any) -> nn.Module:
        """A model laid out by a plan."""
        return model

    def read(self, x: Any) -> Tensor:
        """The whole value."""
        return x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


class Here(World):
    """This library, on all ranks."""

    def __init__(self) -> None:
        self.placement = consistent.placement.all("cpu")

    def lay(self, value: Tensor, sbp: Sbp) -> Any:
        return consistent.distribute(value, self.placement, sbp)

    def relay(self, x: Any, sbp: Sbp) -> Any:
        return x.to_global(sbp=sbp)

    def model(self, model: nn.Module, plan: Any) -> nn.Module:
        return consistent.parallelize(model, self.placement, plan)

    def read(self, x: Any) -> Tensor:
        x = super().read(x)
        return x.full() if isinstance(x, consistent.GlobalTensor) else x


class There(World):
    """torch's DTensor, on all ranks."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def lay(self, value: Tensor, sbp: Sbp) -> Any:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, self.mesh, [placement_of(sbp)])

    def relay(self, x: Any, sbp: Sbp) -> Any:
        return x.redistribute(placements=[placement_of(sbp)])

    def read(self, x: Any) -> Tensor:
        whole = getattr(x, "full_tensor", None)
        return super().read(x if whole is None else whole())


def placement_of(sbp: Sbp) -> Any:
    """DTensor's word for an SBP."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(sbp, Split):
        return Shard(sbp.dim)
    return Partial() if sbp == P else Replicate()


def values(world: World, program: Any) -> list[Tensor] | str:
    """What a program returns, whole and in float64; or the name of the error that it raises."""
    try:
        return [world.read(x).double() for x in tree_leaves(program(world))]
    except Exception as error:
        return f"raises {type(error).__name__}"


def difference(found: list[Tensor] | str, right: list[Tensor]) -> str:
    """What is wrong with it, in few words; "" if nothing is."""
    if isinstance(found, str):
        return found
    if len(found) != len(right):
        return f"{len(found)} values for {len(right)}"
    for a, b in zip(found, right, strict=True):
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} for {tuple(b.shape)}"
        if not bool(a.isfinite().all()):
            return "not finite"
    worst = _error(found, right)
    return f"off by {float(f'{worst * 100:.2g}'):g} %" if worst > 1e-6 else ""


def _error(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor; what is zero but for
    rounding counts as nothing beside the others."""
    largest = [float(b.abs().max()) if b.numel() else 0.0 for b in right]
    least = 1e-9 * max(largest)
    pairs = zip(found, right, largest, strict=True)
    return max(float((a - b).abs().max()) / max(m, least) for a, b, m in pairs if b.numel())


def rand(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers in each world."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers below ``high``."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def grads(loss: Any, *leaves: Any) -> list[Any]:
    """The gradients of a loss."""
    loss.backward()
    return [leaf.grad for leaf in leaves]
