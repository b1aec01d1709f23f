"""ZeRO for graphs (``config.enable_zero``): sharding of optimizer state, gradients and parameters.

Optimizers step on shards of the parameters that ranks hold replicated. With stage 3 the parameters
themselves are stored as shards between their uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..dispatch.plans.shards import is_global
from ..nn.installed import installed_plan
from ..nn.moving import move
from ..nn.moving.job import params_of
from ..nn.plan import Layouts, Plan
from ..nn.sharded.step import install_step
from ..spec import B, NdSbp, S

_STAGE_KEY = "_consistent_zero"


def shard_states(graph: Any, stage: int) -> None:
    """Shard the optimizer state of ``graph`` for ZeRO ``stage``; called before each of its steps.

    Along each placement axis on which a parameter is replicated (B), the optimizer steps S(0)
    shards of it: ``(B, S(1)) -> (S(0), S(1))``. From stage 2 on the gradient has that layout too,
    and with stage 3 the parameter itself between uses. A parameter with an S(0) already stays as it
    is. A module is changed only once for a stage, so later calls cost little.

    Raises:
        ValueError: with stage 3, a global parameter belongs to a module that was not passed to
            ``parallelize``.
    """
    if stage == 3:
        _shard_parameters(graph)
        return
    if not stage:
        return
    for module in graph.modules():
        if module.__dict__.get(_STAGE_KEY) == stage:
            continue
        module.__dict__[_STAGE_KEY] = stage
        layouts: dict[str, Layouts] = {}
        for name, param in module.named_parameters(recurse=False):
            if is_global(param) and param.ndim and S(0) not in param.sbp:  # type: ignore[attr-defined]
                sbp, placement = tuple(param.sbp), param.placement  # type: ignore[attr-defined]
                split_sbp = _split_broadcast(sbp)
                param_layouts = Layouts(sbp, grad=split_sbp if stage > 1 else sbp, step=split_sbp)
                layouts[name] = param_layouts.on(placement)
        if layouts:
            install_step(module, Plan(layouts))


def _split_broadcast(sbp: NdSbp) -> NdSbp:
    """Return ``sbp`` with S(0) in place of each B: ``(B, S(1)) -> (S(0), S(1))``."""
    return tuple(S(0) if entry is B else entry for entry in sbp)


def _shard_parameters(graph: Any) -> None:
    """Store the replicated parameters of parallelized modules as shards (ZeRO stage 3).

    Each module is moved to its present plan with S(0) in place of B; gradients and the state of its
    optimizers follow. Parameters are still used in the layouts of the present plan.
    """
    modules = list(_outermost(graph, [m for m in vars(graph).values() if isinstance(m, nn.Module)]))
    for module in modules:
        if module.__dict__.get(_STAGE_KEY) == 3:
            continue
        present_plan = installed_plan(module)
        assert present_plan is not None
        tensors = dict(present_plan.tensors)
        for name, param in module.named_parameters(remove_duplicate=False):
            layouts = tensors.get(name)
            if layouts is not None and param.ndim and S(0) not in layouts.sbp:
                tensors[name] = Layouts(_split_broadcast(layouts.sbp), use=layouts.use)
        own_params = {id(param) for param in module.parameters()}
        # ``move`` accepts optimizers of this module's parameters only.
        optimizers = [
            o for o in graph.optimizers() if all(id(p) in own_params for p in params_of(o))
        ]
        split_plan = Plan(
            tensors,
            present_plan.modules,
            axes=present_plan.axes,
            notes=present_plan.notes,
            keep_bytes=present_plan.keep_bytes,
        )
        move(module, optimizers, None, split_plan)
        module.__dict__[_STAGE_KEY] = 3


def _outermost(graph: Any, modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost modules that were passed to ``parallelize``, among ``modules`` and below.

    Raises:
        ValueError: a module outside of them has a global parameter.
    """
    for module in modules:
        if installed_plan(module) is not None:
            yield module
            continue
        for name, param in module.named_parameters(recurse=False):
            if is_global(param):
                raise ValueError(
                    f"{type(graph).__name__}: enable_zero(stage=3) splits the parameters of "
                    f"modules that were given to consistent.parallelize, and {name!r} of a "
                    f"{type(module).__name__} was made global otherwise.\n  Call "
                    "consistent.parallelize(module, placement) before the graph is made, or make "
                    "the parameter with sbp=S(0)."
                )
        yield from _outermost(graph, list(module.children()))
