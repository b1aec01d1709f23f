"""Optimizers that need whole matrices, as users write them: a Shampoo, a SOAP, steps in batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Shampoo(torch.optim.Optimizer):
    """Shampoo with lists, numbers and tensors of other shapes in its state. It reads values."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, group)
        return loss

    def _step_one(self, p: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[p], p.grad
        assert grad is not None
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(p)
            state["sums"] = [torch.eye(n, dtype=p.dtype) * 1e-3 for n in p.shape]
            state["roots"] = [torch.eye(n, dtype=p.dtype) for n in p.shape]
        update = grad.clone()
        for dim, total in enumerate(state["sums"]):
            rows = grad.movedim(dim, 0).flatten(1) if p.ndim > 1 else grad[:, None]
            total.addmm_(rows, rows.T)
            if state["step"] % group["every"] == 0:
                values, vectors = torch.linalg.eigh(total)
                power = values.clamp(min=1e-12).pow(-1 / (2 * p.ndim))
                state["roots"][dim] = vectors * power @ vectors.T
            update = update.movedim(0, -1) @ state["roots"][dim]
        if update.norm().item() > 1.0:
            update /= update.norm()
        state["step"] += 1
        state["momentum"].mul_(group["momentum"]).add_(update)
        p.add_(state["momentum"], alpha=-group["lr"])


class Soap(torch.optim.Optimizer):
    """SOAP of matrices (Vyas et al. 2024): Adam in the eigenbases of Shampoo's two sums.

    The first sums have less than full rank, so rounding alone decides some of their eigenvectors.
    """

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, group["lr"], group["beta"])

    def _step_one(self, p: Tensor, lr: float, beta: float) -> None:
        state, grad = self.state[p], p.grad
        assert grad is not None
        sums = grad @ grad.T, grad.T @ grad
        if not state:
            state["sums"], state["means"] = [x * (1 - beta) for x in sums], torch.zeros_like(p)
            state["squares"] = torch.zeros_like(p)
            state["bases"] = [torch.linalg.eigh(x)[1] for x in state["sums"]]
        left, right = state["bases"]
        state["means"].lerp_(grad, 1 - beta)
        state["squares"].lerp_((left.T @ grad @ right).square(), 1 - beta)
        update = (left.T @ state["means"] @ right) / (state["squares"].sqrt() + 1e-8)
        p.sub_(left @ update @ right.T, alpha=lr)
        for i, x in enumerate(sums):
            state["sums"][i].lerp_(x, 1 - beta)
            state["bases"][i] = torch.linalg.qr(state["sums"][i] @ state["bases"][i])[0]


class Batched(torch.optim.Optimizer):
    """Divides gradients by their largest singular value, those of one shape in one batch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for shape in dict.fromkeys(p.shape for p in params):
                alike = [p for p in params if p.shape == shape]
                grads = torch.stack([p.grad.flatten(1) for p in alike])
                for p, update in zip(alike, grads / torch.linalg.norm(grads, 2, (1, 2), True)):
                    p.sub_(update.view(p.shape), alpha=group["lr"])
