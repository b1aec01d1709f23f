"""LossMeter: the logical loss of a step, summed over the ranks together with the gradients."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..movement.world import my_coordinate
from ..spec import B
from ..tensor.making.create import distribute, from_local


class LossMeter:
    """Shows the loss of each step without a collective for it.

    ```
    for batch in tqdm(loader):
        loss = model(**batch).loss
        meter(loss).backward()
        bar.set_postfix(loss=meter.value)
    ```

    The loss of a split batch is P: each rank has an addend, and ``loss.item()`` would be an
    all-reduce. ``meter(loss)`` is ``loss + weight * loss.detach()`` with a weight of 0: the same
    number with the same gradients, and the gradient of the weight is the loss. It lies in a bucket
    with the parameters' gradients and is summed there.
    """

    def __init__(self) -> None:
        self._weight: Any = None
        self._sum = 0.0
        self._was_read = False

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss``, to be given to ``backward``. ``value`` is then the sum of the losses given
        since it was read last, so that a step may have several."""
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
        # On the shards: as an op on global tensors the product might be boxed to B at once.
        part = self._weight.to_local() * loss.detach().to_local()  # type: ignore[attr-defined]
        return loss + from_local(part, placement, entries, shape=())

    @property
    def value(self) -> float:
        """The loss of the last step, on every rank of its placement; NaN on others. Read it after
        ``backward``, and outside ``no_sync``, where it waits for the gradients' sum."""
        self._add_what_arrived()
        self._was_read = True
        return self._sum

    def _add_what_arrived(self) -> None:
        if self._weight is None or self._weight.grad is None:
            return
        grad, self._weight.grad = self._weight.grad, None
        if any(entry is not B for entry in grad.sbp):
            raise RuntimeError(
                "LossMeter: the loss is read inside no_sync(), where gradients are not summed over "
                "the ranks yet. Read it after the step, or use loss.item(), which sums it."
            )
        self._sum += float(grad.to_local())
