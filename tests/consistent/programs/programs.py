"""Small programs: lines of Python over tensors ``v0, v1, ...``, the same for plain and global ones.

``run`` runs one on every rank and compares with plain torch, ``snippet`` prints one that runs by
itself. ``drawing.py`` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import consistent
from consistent.dispatch.plans.shards import attach
from consistent.spec import B, P, Placement, TensorSpec
from mirrored.transports.default import current
from tests.reference import scatter, shard_at


@dataclass(frozen=True)
class Leaf:
    """A floating leaf that requires grad."""

    shape: tuple[int, ...]
    sbp: str


@dataclass(frozen=True)
class Program:
    """``ranks`` of the placement, leaves ``v0...`` and lines that make further names."""

    ranks: list
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    backward: str  # the name that the loss is made of


def values(program: Program) -> list[torch.Tensor]:
    """The leaves' logical values, away from the kinks of relu and abs."""
    made = []
    for i, leaf in enumerate(program.leaves):
        random = torch.Generator().manual_seed(i)
        made.append(torch.randn(leaf.shape, generator=random, dtype=torch.float64))
    return made


def execute(program: Program, leaves: list[Any]) -> dict[str, Any]:
    """Every name after the program ran on ``leaves``."""
    names: dict[str, Any] = {f"v{i}": leaf for i, leaf in enumerate(leaves)}
    scope = {"torch": torch, "F": F}
    for line in program.lines:
        exec(line, scope, names)  # noqa: S102 - lines that this module wrote
    return names


def loss_of(names: dict[str, Any], program: Program) -> Any:
    """A scalar whose gradient with respect to the result differs from element to element."""
    y = names[program.backward]
    weights = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).view(y.shape)
    return (y * weights).sum()


def run_plain(program: Program) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
    leaves = [x.requires_grad_() for x in values(program)]
    names = execute(program, leaves)
    return names, list(torch.autograd.grad(loss_of(names, program), leaves, allow_unused=True))


def run(rank: int, program: Program) -> list[str]:
    """What differs from plain torch."""
    names, grads = run_plain(program)
    placement = Placement("cpu", program.ranks)
    leaves = [
        lay(x, placement, leaf.sbp, seed)
        for seed, (x, leaf) in enumerate(zip(values(program), program.leaves))
    ]
    for x in leaves:
        x.requires_grad_()
    ours = execute(program, leaves)
    loss_of(ours, program).backward()
    wrong = []
    for name, value in names.items():
        wrong += _differs(name, ours[name], value)
    for i, (x, grad) in enumerate(zip(leaves, grads, strict=True)):
        # Every rank has the gradient of a P leaf already: B, which costs nothing to box to P.
        if x.grad is not None and x.grad.sbp != tuple(B if e is P else e for e in x.sbp):
            wrong.append(f"v{i}.grad lies {x.grad.sbp}, v{i} {x.sbp}")
        if (x.grad is None) != (grad is None):
            wrong.append(f"v{i}.grad is {x.grad}, plain torch says {grad}")
        elif grad is not None:
            wrong += _differs(f"v{i}.grad", x.grad, grad)
    return wrong


def lay(x: torch.Tensor, placement: Placement, sbp: Any, seed: int = 0) -> Any:
    """``x`` as a global tensor; P addends are random and uneven."""
    spec = TensorSpec.of(placement, sbp, x.shape, x.dtype)
    return attach(shard_at(scatter(x, spec, seed), spec, current().rank), spec)


def _differs(name: str, ours: Any, plain: Any) -> list[str]:
    if isinstance(plain, tuple | list):
        return [
            text
            for k, pair in enumerate(zip(ours, plain, strict=True))
            for text in _differs(f"{name}[{k}]", *pair)
        ]
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return [
            f"{name} is {ours.dtype} {tuple(ours.shape)}, "
            f"plain torch says {plain.dtype} {tuple(plain.shape)}"
        ]
    given = ours.detach().full() if isinstance(ours, consistent.GlobalTensor) else ours.detach()
    fault = _shard_fault(name, ours)
    scale = float(plain.detach().abs().max().clamp_min(1.0)) if plain.numel() else 1.0
    # Some functions of integers are float32.
    close = (1e-5 if plain.dtype == torch.float32 else 1e-9) * scale
    if not torch.allclose(given, plain.detach(), rtol=0, atol=close, equal_nan=True):
        return [
            f"{name} {getattr(ours, 'sbp', 'plain')}\n"
            f"  is          {given.tolist()}\n  should be   {plain.tolist()}",
            *fault,
        ]
    return fault


def _shard_fault(name: str, ours: Any) -> list[str]:
    if not isinstance(ours, consistent.GlobalTensor):
        return []
    spec = ours._spec
    wanted = spec.local_shape(spec.placement.coordinate_of(current().rank))
    with torch._C.DisableTorchFunctionSubclass():
        held = tuple(torch.Tensor.size(ours))
    return [] if held == wanted else [f"{name}: shard of shape {held}, and {spec} says {wanted}"]


def snippet(program: Program, world: int) -> str:
    """The program as a script for torchrun."""
    leaves = "\n".join(
        f"v{i} = consistent.distribute(torch.randn({leaf.shape}, "
        f"generator=torch.Generator().manual_seed({i}), "
        f'dtype=torch.float64), p, "{leaf.sbp}").requires_grad_()'
        for i, leaf in enumerate(program.leaves)
    )
    lines = "\n".join(program.lines)
    y = program.backward
    grads = ", ".join(f"v{i}.grad" for i in range(len(program.leaves)))
    return (
        f"# torchrun --nproc_per_node {world} this.py\n"
        f"import torch, torch.nn.functional as F, consistent\n"
        f'torch.distributed.init_process_group("gloo")\n'
        f'p = consistent.placement("cpu", {program.ranks})\n{leaves}\n{lines}\n'
        f"w = torch.linspace(-1.0, 2.0, {y}.numel(), dtype={y}.dtype).view({y}.shape)\n"
        f"({y} * w).sum().backward()\nprint({y}, {grads})\n"
    )
