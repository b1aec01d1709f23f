"""``visualize()``, which makes the picture of a tensor, of a model, or of a schedule."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..drawing.pictures.picture import Picture
from ..pipeline.picture import SchedulePicture
from ..pipeline.table import Schedule
from ..spec import Placement, TensorSpec
from .model import ModelPicture
from .tensor import TensorPicture


def visualize(x: Any) -> Picture:
    """Return the picture of ``x``.

    ```
    print(consistent.visualize(x))            # in the terminal
    consistent.visualize(x).save("x.svg")     # or "x.png", where matplotlib is installed
    print(consistent.visualize(model))
    ```

    Args:
        x: a global tensor or its ``TensorSpec``: the picture shows the part that each rank holds. A
            module: it shows the layout of each parameter and buffer, and how many bytes of it a
            rank holds. The table of a pipeline's schedule: it shows what each placement does at
            which time.

    Nothing is communicated and no value is read, so one rank may call this alone. The picture is
    the same on every rank.

    Raises:
        TypeError: ``x`` is something else, such as a plain tensor, which is on one device.
    """
    if is_global(x):
        return TensorPicture(x._spec)
    if isinstance(x, TensorSpec):
        return TensorPicture(x)
    if isinstance(x, torch.nn.Module):
        return ModelPicture(x)
    if isinstance(x, Schedule):
        return SchedulePicture(x)
    raise TypeError(_refusal(x))


def _refusal(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return (
            f"visualize: x is a plain tensor of shape {tuple(x.shape)}, which lies whole on this "
            f"process's {x.device}, and there is nothing to show.\n"
            "  Give a global tensor: consistent.distribute(x, placement, sbp)."
        )
    if isinstance(x, Placement):
        return (
            f"visualize: x is {x}, and a placement alone does not say how a tensor lies.\n"
            "  Give a spec: consistent.TensorSpec.of(placement, sbp, shape, dtype)."
        )
    return (
        f"visualize: x is of type {type(x).__name__}, and pictures are made of global tensors, "
        "specs, modules and schedules of pipelines.\n"
        "  Give one of these; of a Pipeline give its model."
    )
