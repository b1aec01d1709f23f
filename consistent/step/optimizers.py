"""Optimizers of a graph, with their learning rate schedules and a gradient scaler."""

from __future__ import annotations

from typing import Any

import torch


class Optimizers:
    """Optimizers of a ``Graph``, with their learning rate schedules and one gradient scaler.

    A training step calls ``begin`` before ``build``, and ``step`` after it.
    """

    def __init__(self) -> None:
        self.scaler: Any = None
        self._pairs: list[tuple[torch.optim.Optimizer, Any]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, optimizer: Any, schedule: Any) -> None:
        """Add ``optimizer`` and its schedule; raise TypeError if it is not a torch optimizer."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"add_optimizer: optim is a {type(optimizer).__name__}. Give an optimizer of torch,"
                " such as torch.optim.AdamW(model.parameters())."
            )
        self._pairs.append((optimizer, schedule))

    def list(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers, in the order in which they were added."""
        return [optimizer for optimizer, _ in self._pairs]

    def begin(self) -> None:
        """Drop the gradients of the previous step (``zero_grad`` of each optimizer)."""
        for optimizer, _ in self._pairs:
            optimizer.zero_grad()

    def step(self, name: str) -> None:
        """Step every optimizer, then update the gradient scaler and step the schedules.

        ``name`` is the name of the graph, for the error.

        Raises:
            RuntimeError: none of the parameters of an optimizer has a gradient.
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
        # Once after all optimizers: ``update`` clears the scaler's record of which gradients
        # overflowed.
        if self._pairs and self.scaler is not None:
            self.scaler.update()
        for _, schedule in self._pairs:
            if schedule is not None:
                schedule.step()
