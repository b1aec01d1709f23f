"""Get the loss over the whole batch from the reduction of the gradients (``LossMeter``)."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..movement.world import my_coordinate
from ..spec import B
from ..tensor.making.create import distribute, from_local


class LossMeter:
    """Meter that gives the loss of each step without a collective of its own.

    ```
    for batch in tqdm(loader):
        loss = model(**batch).loss
        meter(loss).backward()
        bar.set_postfix(loss=meter.value)
    ```

    The loss of a split batch is a partial sum (P): each rank has an addend, and ``loss.item()``
    would be an all-reduce. ``meter(loss)`` is ``loss + weight * loss.detach()`` with a weight of 0.
    This is the same number with the same gradients, and the gradient of the weight is the loss.
    That gradient is reduced in one message with those of the parameters.
    """

    def __init__(self) -> None:
        self._weight: Any = None
        self._sum = 0.0
        self._was_read = False

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss equal to ``loss``, on which to call ``backward``.

        A step may pass several losses, as with gradient accumulation: ``value`` is the sum of all
        that were passed since it was last read.
        """
        if self._was_read:
            self._sum, self._was_read = 0.0, False
        if not is_global(loss):
            self._sum += float(loss.detach())
            return loss
        placement, entries = loss.placement, loss.sbp  # type: ignore[attr-defined]
        if self._weight is None or self._weight.placement != placement:
            self._add_what_arrived()
            zero = torch.zeros((), dtype=loss.dtype)
            self._weight = distribute(zero, placement, (B,) * placement.ndim).requires_grad_()
        if my_coordinate(placement) is None:
            self._sum = float("nan")
        # On the shards, because an op on global tensors might box the product to B at once.
        part = self._weight.to_local() * loss.detach().to_local()  # type: ignore[attr-defined]
        return loss + from_local(part, placement, entries, shape=())

    @property
    def value(self) -> float:
        """Return the loss of the last step, on every rank of its placement; NaN on other ranks.

        Read it after ``backward`` and outside ``no_sync``: it waits for the sum of the gradients.
        """
        self._add_what_arrived()
        self._was_read = True
        return self._sum

    def _add_what_arrived(self) -> None:
        """Add the gradient of the weight, which is the loss over the whole batch, to the sum."""
        if self._weight is None or self._weight.grad is None:
            return
        grad, self._weight.grad = self._weight.grad, None
        if any(entry is not B for entry in grad.sbp):
            raise RuntimeError(
                "LossMeter: the loss is read inside no_sync(), where gradients are not summed over "
                "the ranks yet. Read it after the step, or use loss.item(), which sums it."
            )
        self._sum += float(grad.to_local())
