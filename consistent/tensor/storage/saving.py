"""Copies of global tensors: deepcopy, pickle and ``torch.save``.

A saved global tensor is this rank's shard with its layout. It can be loaded on the rank at the same
coordinate of the placement, in a world that has all its ranks. To load on another placement, save
``x.full()`` or ``consistent.checkpoint.full_state_dict(module)`` instead.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
import warnings
from typing import Any

import torch

from mirrored.transports.default import current

from ...dispatch.plans import gradients
from ...dispatch.plans.shards import attach, plain
from ...movement.world import my_coordinate
from .restored import UNSAVED_ATTRIBUTES, restored_tensor


def shallow_copy(x: Any) -> Any:
    """Implement ``copy.copy``: return another object with the same memory, a leaf as in torch."""
    new = attach(plain(x.detach()), x._spec)
    _copy_attributes(x, new)
    return new


def deep_copy(x: Any, memo: dict) -> Any:
    """Implement ``copy.deepcopy`` of a leaf.

    As in torch, the copy of a parameter has no gradient, and the copy of another leaf has one.

    Raises:
        RuntimeError: ``x`` is not a leaf.
    """
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise RuntimeError(
            "deepcopy: this tensor is the result of ops that autograd recorded, and only leaves "
            "are copied deeply. "
            "Use x.detach().clone()."
        )
    new = x.detach().clone()
    memo[id(x)] = new
    _copy_attributes(x, new)
    if x.grad is not None and not isinstance(x, torch.nn.Parameter):
        gradients.set_raw_grad(new, copy.deepcopy(x.grad, memo))
    return new


def reduce(x: Any) -> tuple:
    """Implement pickling, as for ``torch.save``: return this rank's shard and its layout."""
    # Apart from the shard only tuples, lists, numbers, strings and a dtype, so that
    # torch.load(weights_only=True) can load it.
    spec = x._spec
    if not all(entry.is_broadcast for entry in spec.sbp):
        _warn_of_shared_path()
    coordinate = my_coordinate(spec.placement)
    local = None if coordinate is None else plain(x.detach()).cpu().contiguous()
    grid = (spec.placement.type, spec.placement.ranks.tolist(), spec.placement.axes)
    extra = {k: v for k, v in x.__dict__.items() if k not in UNSAVED_ATTRIBUTES}
    layout = (grid, str(spec.sbp), tuple(spec.shape), spec.dtype)
    return (_rebuild, (local, layout, coordinate, x.requires_grad, extra))


def _warn_of_shared_path() -> None:
    """Warn if ``torch.save`` writes a shard to a path that other ranks may write to as well.

    Each rank would overwrite what the others wrote. Ranks cannot compare their paths here, because
    this rank may be the only one that saves; a path that names the rank counts as safe.
    """
    # Find the call of torch.save among the callers; its argument ``f`` is the path.
    frame: Any = sys._getframe()
    level = 1
    while (
        frame.f_globals.get("__name__") != "torch.serialization" or frame.f_code.co_name != "save"
    ):
        frame, level = frame.f_back, level + 1
        if frame is None:
            return  # pickle without torch.save, as when an object is sent to another process
    path, ranks = _path_of(frame.f_locals.get("f")), current()
    if path is None or ranks.size == 1 or _names_rank(path, ranks.rank):
        return
    warnings.warn(
        f"torch.save to {path!r} writes this rank's shards of global tensors, and the "
        "path does not name the rank: what ranks write to one path overwrites what others wrote. "
        "consistent.checkpoint.save writes what any number of ranks loads, checkpoint.save_full "
        "one whole file; or give each rank a path with its number.",
        stacklevel=level + 1,
    )


def _path_of(f: Any) -> str | None:
    """Return the path that ``torch.save`` writes to; ``f`` is its argument, a path or an open file.

    Returns None if ranks share no such file: memory, a temporary file, standard output.
    """
    if not isinstance(f, str | os.PathLike):
        if isinstance(f, tempfile._TemporaryFileWrapper):
            return None
        f = getattr(f, "name", None)  # an int if the file was opened by its descriptor
    if not isinstance(f, str | os.PathLike):
        return None
    path = os.fsdecode(f)
    return None if path.startswith("<") else path


def _names_rank(path: str, rank: int) -> bool:
    """Return whether the name of the file or its folder has the number ``rank`` in it.

    For rank 1, model.1.pt and rank_01/model.pt have it.
    """
    folder, name = os.path.split(path)
    number = rf"0*{rank}(?!\d)"
    in_name = re.search(rf"(?<!\d){number}", name)
    return bool(in_name or re.fullmatch(rf"(rank|r)?[-_]?{number}", os.path.basename(folder)))


def _copy_attributes(old: Any, new: Any) -> None:
    """Give ``new``, a copy of ``old``, the attributes that copies share, and ``requires_grad``."""
    for key, value in old.__dict__.items():
        if key not in UNSAVED_ATTRIBUTES:
            new.__dict__[key] = value
    if old._data_was_read:  # a shallow copy shares memory, so writes may reach it uncounted, too
        new._data_was_read = True
    if old.requires_grad:
        new.requires_grad_()


def _rebuild(local: Any, layout: Any, saved_at: Any, requires_grad: Any, extra: Any) -> Any:
    """Load what ``reduce`` wrote: return the global tensor with this shard and layout.

    Saved files refer to this function by name, so it must not be renamed.
    """
    return restored_tensor(local, layout, saved_at, requires_grad=requires_grad, extra=extra)


# torch.load(weights_only=True) calls only functions that are registered here.
torch.serialization.add_safe_globals([_rebuild])
