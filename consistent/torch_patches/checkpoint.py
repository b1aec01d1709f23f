"""Changes for ``torch.utils.checkpoint``: how it compares recomputed tensors, and what it saves.

It compares saved tensors with recomputed ones, and keeps the inputs for the recomputation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint as checkpointing

from ..dispatch.plans.shards import attach, is_global, plain


def install() -> None:
    """Make ``torch.utils.checkpoint`` compare shards, and keep the inputs global.

    It compares what was saved with what is recomputed. A saved tensor is seen as global or as its
    shard, depending on how the op was run, so both are compared as the shard.
    """
    compare = checkpointing._allowed_determinism_checks_to_fns
    mode = checkpointing._DEFAULT_DETERMINISM_MODE
    metadata = compare[mode]
    compare[mode] = lambda x: metadata(plain(x) if is_global(x) else x)
    module: Any = checkpointing
    if hasattr(module._CheckpointFrame, "save_inputs"):
        _keep_specs(module._CheckpointFrame)
    else:  # before torch 2.13 an autograd function kept the inputs
        _keep_specs_in_function(module._NoopSaveInputs)


def _keep_specs(frame: Any) -> None:
    """Patch the class ``frame`` of a checkpoint to restore the specs of the inputs that it saves.

    If hooks for saved tensors are active, such an input comes back as another object, a plain
    tensor.
    """
    save, get = frame.save_inputs, frame.get_inputs

    @functools.wraps(save)
    def save_inputs(self: Any, *args: Any) -> None:
        save(self, *args)
        self.specs = _specs(args)

    @functools.wraps(get)
    def get_inputs(self: Any) -> Any:
        return _with_specs(get(self), self.specs)

    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs


def _keep_specs_in_function(function: Any) -> None:
    """Patch an autograd Function of a checkpoint to restore the specs of the inputs that it saves.

    It is ``_keep_specs`` for older releases of torch.
    """
    setup = function.setup_context

    @functools.wraps(setup)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        setup(ctx, inputs, output)
        get, specs = ctx.get_args, _specs(inputs[1:])
        ctx.get_args = lambda saved: _with_specs(get(saved), specs)

    function.setup_context = staticmethod(setup_context)


def _specs(args: Any) -> list[Any]:
    return [x._spec if is_global(x) else None for x in args]


def _with_specs(tensors: Any, specs: list[Any]) -> Any:
    """Return ``tensors``, saved ones, with those global again for which ``specs`` has a spec."""
    restored = (
        x if spec is None or is_global(x) else attach(x, spec)
        for x, spec in zip(tensors, specs, strict=True)
    )
    return type(tensors)(restored)
