"""``flow.function_config``: settings of a job, which are made before the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...spec import Placement
from ..optimizer import SGD, Adam, Optimizer, PiecewiseConstantScheduler
from ..scope import PlacementScope, View, ViewName


class TrainConfig:
    """``config.train``: the older way to choose an optimizer and to declare that a job trains."""

    def __init__(self) -> None:
        self.lr: float | None = None
        self.update: Mapping[str, Any] = {"naive_conf": {}}

    def primary_lr(self, value: float) -> None:
        """Set the learning rate."""
        self.lr = value

    def model_update_conf(self, conf: Mapping[str, Any]) -> None:
        """Set the update rule.

        ``conf`` is ``{"naive_conf": {}}``, ``{"momentum_conf": {"beta": 0.9}}`` or ``{"adam_conf":
        {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}}``.
        """
        if set(conf) - {"naive_conf", "momentum_conf", "adam_conf"} or len(conf) != 1:
            raise ValueError(
                f"model_update_conf: {dict(conf)} is not known.\n"
                "  Known are naive_conf, momentum_conf and adam_conf, one of them.\n"
                "  For others use optimizer.SGD(...).minimize(loss) in the job."
            )
        self.update = conf

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer that the settings describe, or None if no learning rate was set."""
        if self.lr is None:
            return None
        schedule = PiecewiseConstantScheduler([], [self.lr])
        (kind, options), *_ = self.update.items()
        if kind == "adam_conf":
            return Adam(schedule, **options)
        return SGD(schedule, options.get("beta", 0.9) if kind == "momentum_conf" else 0.0)


class FunctionConfig:
    """Settings of a job, passed to ``global_function``; ``flow.function_config()`` makes them."""

    def __init__(self) -> None:
        self.dtype = torch.float32
        self.view: ViewName | None = None
        self.placement: Placement | None = None
        self.train = TrainConfig()

    def default_data_type(self, dtype: torch.dtype) -> None:
        """Set the dtype of the job's variables."""
        self.dtype = dtype

    def default_logical_view(self, view: View) -> None:
        """Set the view: ``scope.consistent_view()`` (the default) or ``scope.mirrored_view()``.

        The view decides whether the job takes and returns whole batches or one part per device.
        """
        self.view = view.name

    def default_distribute_strategy(self, strategy: View) -> None:
        """Set the view; the older name of ``default_logical_view``."""
        self.default_logical_view(strategy)

    def default_placement_scope(self, scope: PlacementScope) -> None:
        """Set the placement on which the job runs; by default it runs on all devices."""
        self.placement = scope.placement


function_config = FunctionConfig
"""``FunctionConfig`` under the documents' name, ``function_config()``."""
