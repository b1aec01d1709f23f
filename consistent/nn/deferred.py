"""Initialize modules that were built on ``meta``, with only this rank's shards allocated.

```
with torch.device("meta"):
    model = GPT()                                   no memory
consistent.parallelize(model, placement, "zero3")   shards, filled by the modules' own initialisers
```

This serves modules that are too large for one rank. Initialisers (``reset_parameters``,
``_init_weights``) run on the global parameters. A random number depends on the seed, on the number
of random ops before, and on the element's logical index, so each rank draws only its own shard. The
values are those that the same call gives on one rank, for every placement and plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..dispatch.plans.shards import attach, is_global, plain
from ..movement.world import device_of, my_coordinate
from ..spec import TensorSpec
from .slots import plain_attributes

_HF_MARK = "_is_hf_initialized"  # transformers initialises the tensors without this mark


def empty_shard(spec: TensorSpec) -> Any:
    """Return a global tensor of ``spec`` with an uninitialized shard on this rank.

    It takes the place of a parameter that was built on ``meta``; ``initialise`` or a load fills it.
    On a rank outside the placement the shard is a meta tensor.
    """
    at = my_coordinate(spec.placement)
    device = torch.device("meta") if at is None else device_of(spec.placement)
    return attach(torch.empty(spec.local_shape(at), dtype=spec.dtype, device=device), spec)


def initialise(module: nn.Module, names: Collection[str]) -> None:
    """Initialize the named parameters and buffers with the initialisers of their modules.

    Tensors that no initialiser writes become NaN, with a warning.

    Args:
        module: a module whose tensors are global and allocated.
        names: the tensors that have no values yet.

    Raises:
        ValueError: no initialiser writes a tensor whose dtype has no NaN.
    """
    tensors = _global_tensors(module, names)
    # The version counter shows later which tensors an initialiser wrote in place.
    versions = {name: x._version for name, x in tensors.items()}
    unset_ids = {id(x) for x in tensors.values()}
    with torch.no_grad():
        if hasattr(module, "initialize_weights") and hasattr(module, "_init_weights"):
            _initialise_by_transformers(module, unset_ids)
        else:
            _initialise_by_own_methods(module, unset_ids)
    unwritten_names = [
        name for name, x in tensors.items() if x._version == versions[name] and x.numel()
    ]
    if unwritten_names:
        _fill_with_nan(unwritten_names, tensors)


def check_attributes(module: nn.Module) -> None:
    """Raise if a tensor attribute that is no parameter or buffer is still on ``meta``.

    Called after the initialisers have run.

    Raises:
        ValueError: the message names the attribute.
    """
    for places in plain_attributes(module):
        owner, key, name, value = places[0]
        if value.is_meta:
            raise ValueError(
                f"parallelize: {name!r} was built on meta, so its values are lost. It is neither a "
                f"parameter nor a buffer of {type(owner).__name__}, and no reset_parameters or "
                f"_init_weights makes it again. Write self.register_buffer({key!r}, ..., "
                "persistent=False) and fill it in reset_parameters, or build the module outside "
                'of torch.device("meta").'
            )


def _global_tensors(module: nn.Module, names: Collection[str]) -> dict[str, Any]:
    """Return those of the named parameters and buffers that are global, by name."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)),
               **dict(module.named_buffers(remove_duplicate=False))}  # fmt: skip
    return {name: tensors[name] for name in names if is_global(tensors[name])}


def _initialise_by_own_methods(module: nn.Module, unset_ids: set[int]) -> None:
    """Initialize a module through ``reset_parameters`` and ``_init_weights``, as torch modules do.

    First ``reset_parameters`` of each submodule is called, children before their parents as in the
    calls of constructors. Then the ``_init_weights`` of the outermost module that has one is
    applied to the modules inside it. A module that has a tensor with values already is skipped,
    since an initialiser would overwrite it.

    Args:
        module: the module.
        unset_ids: the ids of the tensors that have no values yet.
    """
    for submodule in _modules_in_post_order(module):
        reset = getattr(submodule, "reset_parameters", None) or getattr(
            submodule, "_reset_parameters", None
        )
        if callable(reset) and _is_uninitialised(submodule, unset_ids):
            reset()
    for submodule in module.modules():
        init: Callable[[nn.Module], None] | None = getattr(submodule, "_init_weights", None)
        if callable(init):
            for inner in _modules_in_post_order(submodule):
                if _is_uninitialised(inner, unset_ids):
                    init(inner)
            return


def _modules_in_post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Return ``module`` and the modules inside it, each after its children, as ``apply`` does."""
    visited: set[nn.Module] = set()

    def visit(submodule: nn.Module) -> Iterator[nn.Module]:
        if submodule not in visited:
            visited.add(submodule)
            for child in submodule.children():
                yield from visit(child)
            yield submodule

    return visit(module)


def _is_uninitialised(module: nn.Module, unset_ids: set[int]) -> bool:
    """Return whether an initialiser of ``module`` would overwrite no values.

    That is, all tensors of ``module`` itself, or if it has none those inside it, have no values.

    Args:
        module: the module whose initialiser is to be called.
        unset_ids: the ids of the tensors that have no values yet.
    """
    own_tensors = [
        x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None
    ]
    inside = own_tensors or [*module.parameters(), *module.buffers()]
    return bool(inside) and all(id(x) in unset_ids for x in inside)


def _initialise_by_transformers(module: Any, unset_ids: set[int]) -> None:
    """Initialize a transformers model by its own ``initialize_weights``.

    Transformers skips tensors that are marked as initialised, so all tensors but those in
    ``unset_ids`` (ids of the tensors without values) are marked for the time of the call.
    """
    for submodule in module.modules():
        submodule.__dict__.pop(_HF_MARK, None)
        for x in (*submodule._parameters.values(), *submodule._buffers.values()):
            if x is not None:
                x.__dict__.pop(_HF_MARK, None) if id(x) in unset_ids else setattr(x, _HF_MARK, True)
    module.initialize_weights()
    for submodule in module.modules():
        for x in (*submodule._parameters.values(), *submodule._buffers.values()):
            if x is not None:
                x.__dict__.pop(_HF_MARK, None)


def _fill_with_nan(names: list[str], tensors: dict[str, Any]) -> None:
    """Fill tensors that no initialiser has written with NaN, and warn.

    Raises:
        ValueError: a tensor's dtype has no NaN.
    """
    lost_names = [name for name in names if not _has_nan(tensors[name].dtype)]
    if lost_names:
        raise ValueError(
            f"parallelize: {', '.join(lost_names[:8])} was built on meta, so its values are lost, "
            "and no reset_parameters or _init_weights of its module writes it. Build it outside of "
            'torch.device("meta"), or give its module a reset_parameters.'
        )
    for name in names:
        plain(tensors[name]).detach().fill_(float("nan"))
    warnings.warn(
        f"parallelize: {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}: built on "
        "meta, and no reset_parameters or _init_weights writes them. They are NaN until they are "
        "loaded.",
        stacklevel=4,
    )


def _has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
