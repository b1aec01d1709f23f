"""torchmetrics: metrics of global tensors.

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
    """``metric``, which from now on takes global tensors and counts each item once.

    torchmetrics adds up what ranks have seen. Here each rank sees the whole, so that is left out.

    Returns:
        ``metric`` itself, changed in place.
    """
    for each in metric.modules():
        if isinstance(each, Metric):
            each.distributed_available_fn = lambda: False
            each.update = _of_whole(each.update)  # type: ignore[method-assign]
    return metric


def _of_whole(update: Callable[..., None]) -> Callable[..., None]:
    def updated(*args: Any, **options: Any) -> None:
        update(*whole(args), **whole(options))

    return updated
