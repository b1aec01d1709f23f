"""The optimizers of a graph, their learning rate schedules, and the scale of its losses."""

from __future__ import annotations

from typing import Any

import torch


class Optimizers:
    """What a training step does before and after ``build``."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self._pairs: list[tuple[torch.optim.Optimizer, Any]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, optimizer: Any, schedule: Any) -> None:
        """Raises TypeError if ``optimizer`` is none."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"add_optimizer: optim is a {type(optimizer).__name__}. Give an optimizer of torch,"
                " such as torch.optim.AdamW(model.parameters())."
            )
        self._pairs.append((optimizer, schedule))

    def list(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in the order in which they were added."""
        return [optimizer for optimizer, _ in self._pairs]

    def begin(self) -> None:
        """Let go of the gradients of the last step."""
        for optimizer, _ in self._pairs:
            optimizer.zero_grad()

    def step(self, name: str) -> None:
        """Step, if there is an optimizer.

        Raises:
            RuntimeError: backward reached none of its parameters.
        """
        for optimizer, _ in self._pairs:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if all(p.grad is None for p in params):
                raise RuntimeError(
                    f"{name}: it has an optimizer, and after build none of the {len(params)} "
                    "parameters of the optimizer has a gradient.\n"
                    "  Call loss.backward() in build, with a loss that they were used for."
                )
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self._pairs and self.scaler is not None:
            self.scaler.update()
        for _, schedule in self._pairs:
            if schedule is not None:
                schedule.step()
