"""Optimizers of whole matrices beside one process, in float32: how far apart the parameters are
under each plan, with the gradients of the plan and with those of the one process; and how far one
process is from itself if each gradient is moved by one unit in the last place.

    pip install --no-deps pytorch-optimizer      from which SOAP and both Shampoos are taken
    python benchmarks/owned.py                   2, 3 and 4 ranks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S, matrix_step
from tests.ranks import pool

STEPS = 6
Steps = list[list[Tensor]]  # tensors of each step
PLANS: dict[int, dict[str, tuple[Any, Any]]] = {
    k: {plan: (ranks, plan) for plan in ("data", "zero1", "zero2", "zero3", "tensor")}
    for k, ranks in ((2, [0, 1]), (3, [2, 0, 1]), (4, [3, 1, 0, 2]))
}
PLANS[4]["zero3 and tensor"] = [[0, 1], [2, 3]], {"dp": "zero3", "tp": "tensor"}


def optimizers() -> dict[str, Callable[[list], Any]]:
    import pytorch_optimizer as others  # pyright: ignore[reportMissingImports]

    return {
        "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.02),
        "Shampoo": lambda ps: others.Shampoo(ps, lr=1e-2),
        "ScalableShampoo": lambda ps: others.ScalableShampoo(
            ps, lr=1e-2, start_preconditioning_step=1, preconditioning_compute_steps=1
        ),
        "SOAP": lambda ps: others.SOAP(ps, lr=3e-3, precondition_frequency=2),
    }


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 36), nn.Tanh(), nn.Linear(36, 12, bias=False)
    )


def moved(grad: Tensor, drawn: torch.Generator) -> Tensor:
    """``grad`` with a third of its numbers one unit in the last place up, and a third down."""
    way = torch.randint(3, grad.shape, generator=drawn)
    up, down = (torch.nextafter(grad, torch.full_like(grad, to)) for to in (torch.inf, -torch.inf))
    return torch.where(way == 0, up, torch.where(way == 1, down, grad))


def trained(
    name: str, where: Any = None, plan: Any = None, given: Steps | None = None, seed: int = 0
) -> tuple[Steps, Steps]:
    """(The parameters after each step, the gradients of each step.) ``given``: gradients that are
    used in place of the step's own; ``seed``: of a noise of the last digit, if it is not 0."""
    model, at = net(), None
    if where is not None:
        grid = isinstance(where[0], list)
        at = Placement("cpu", where, ("dp", "tp")) if grid else Placement("cpu", where)
        consistent.parallelize(model, at, plan)
    params: list[Any] = list(model.parameters())
    optimizer = optimizers()[name](params)
    if at is not None and name != "Muon":  # which does so by itself
        matrix_step(optimizer)
    drawn = torch.Generator().manual_seed(seed)
    values, grads = [], []
    for i in range(STEPS):
        batch = torch.Generator().manual_seed(i)
        x, y = (torch.randn(24, n, generator=batch) for n in (24, 12))
        if at is not None:
            x, y = (consistent.distribute(z, at, (S(0), B)[: at.ndim]) for z in (x, y))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for k, p in enumerate(params):
            if seed:
                p.grad = moved(p.grad, drawn)
            if given is not None:
                own: Any = p.grad
                p.grad = consistent.distribute(given[i][k].clone(), own.placement, own.sbp)
        grads.append([_whole(p.grad) for p in params])
        optimizer.step()
        values.append([_whole(p.detach()) for p in params])
    return values, grads


def _whole(x: Any) -> Tensor:
    return (x.full() if isinstance(x, consistent.GlobalTensor) else x).clone()


def apart(found: Steps, wanted: Steps) -> float:
    return max((x - y).abs().max().item() for x, y in zip(found[-1], wanted[-1], strict=True))


def compare(rank: int, plans: dict, wanted: dict[str, tuple[Steps, Steps]]) -> dict:
    torch.set_num_threads(1)
    found = {}
    for name, (values, grads) in wanted.items():
        for plan, (where, said) in plans.items():
            own = trained(name, where, said)[0]
            same = trained(name, where, said, given=grads)[0]
            found[name, plan] = apart(own, values), apart(same, values)
    return found


def main() -> None:
    torch.set_num_threads(1)
    wanted = {name: trained(name) for name in optimizers()}
    print(f"the largest difference of a parameter after {STEPS} steps")
    for name, (values, _) in wanted.items():
        size = apart(values, [list(net().parameters())])
        noise = max(apart(trained(name, seed=seed)[0], values) for seed in (1, 2, 3))
        print(f"{name:16} largest update {size:.0e}   one process, last digits moved {noise:.0e}")
    for k, plans in PLANS.items():
        for (name, plan), (own, same) in (
            pool(k).run(compare, plans, wanted, timeout=300)[0].items()
        ):
            print(
                f"{name:16} {k} ranks, {plan:16}   own gradients {own:.0e}   equal ones {same:.0e}"
            )


if __name__ == "__main__":
    from benchmarks import owned  # importable by the ranks

    owned.main()
