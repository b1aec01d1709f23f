"""Adapter for torchmetrics: metrics that take global tensors.

```
accuracy = logical(MulticlassAccuracy(10))
accuracy.update(logits, labels)       # every rank
print(accuracy.compute())             # the number of one process
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torchmetrics import Metric, MetricCollection

from .whole import whole

AnyMetric = TypeVar("AnyMetric", Metric, MetricCollection)


def logical(metric: AnyMetric) -> AnyMetric:
    """Make ``metric`` take global tensors and count each item once.

    torchmetrics sums the states of the ranks. Here each rank computes on the whole tensors, so this
    sum is turned off.

    Returns:
        ``metric`` itself, changed in place.
    """
    for module in metric.modules():
        if isinstance(module, Metric):
            module.distributed_available_fn = lambda: False
            module.update = _update_on_whole(module.update)  # type: ignore[method-assign]
    return metric


def _update_on_whole(update: Callable[..., None]) -> Callable[..., None]:
    def updated(*args: Any, **options: Any) -> None:
        update(*whole(args), **whole(options))

    return updated
