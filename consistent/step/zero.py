"""``config.enable_zero``: optimizers step on shares of the parameters that ranks hold alike."""

from __future__ import annotations

from typing import Any

from ..dispatch.plans.shards import is_global
from ..nn.plan import Layouts, Plan
from ..nn.sharded_step import install_step
from ..spec import B, S

_DONE = "_consistent_zero"


def settle(graph: Any, stage: int) -> None:
    """Once for each module: parameters that are B on an axis, and whose dim 0 is not split, step as
    S(0) along it; from stage 2 on their gradients lie so, too."""
    if not stage:
        return
    for module in graph.modules():
        if module.__dict__.get(_DONE) == stage:
            continue
        module.__dict__[_DONE] = stage
        found: dict[str, Layouts] = {}
        for name, param in module.named_parameters(recurse=False):
            if is_global(param) and param.ndim and S(0) not in param.sbp:  # type: ignore[attr-defined]
                own = tuple(param.sbp)  # type: ignore[attr-defined]
                shared = tuple(S(0) if entry is B else entry for entry in own)
                found[name] = Layouts(own, grad=shared if stage > 1 else own, step=shared)
        if found:
            install_step(module, Plan(found))
