"""Copies of global tensors: deepcopy, pickle and ``torch.save``.

A saved global tensor is this rank's shard with its layout. It loads on the rank at the same
coordinate of the placement, in a world that has all its ranks; ``x.full()``, or
``consistent.checkpoint.full_state_dict(module)``, is what to save for another placement.
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
from .restored import OWN, restored


def shallow_copy(x: Any) -> Any:
    """``copy.copy``: another object of the same memory, and a leaf, as torch's."""
    new = attach(plain(x.detach()), x._spec)
    _carry(x, new)
    return new


def deep_copy(x: Any, memo: dict) -> Any:
    """``copy.deepcopy`` of a leaf. As in torch, a copy of a parameter has no gradient, and one of
    another leaf has."""
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
    _carry(x, new)
    if x.grad is not None and not isinstance(x, torch.nn.Parameter):
        gradients.set_raw_grad(new, copy.deepcopy(x.grad, memo))
    return new


def reduce(x: Any) -> tuple:
    """The state that pickle and ``torch.save`` write: this rank's shard and its layout."""
    # Only lists, numbers and strings beside the shard, so that torch.load(weights_only=True) takes
    # it.
    spec = x._spec
    if not all(entry.is_broadcast for entry in spec.sbp):
        _warn_of_one_path()
    at = my_coordinate(spec.placement)
    local = None if at is None else plain(x.detach()).cpu().contiguous()
    grid = (spec.placement.type, spec.placement.ranks.tolist(), spec.placement.axes)
    extra = {k: v for k, v in x.__dict__.items() if k not in OWN}
    layout = (grid, str(spec.sbp), tuple(spec.shape), spec.dtype)
    return (_rebuild, (local, layout, at, x.requires_grad, extra))


def _warn_of_one_path() -> None:
    """Warn if ``torch.save`` of a shard is given a path that other ranks may be given, too: of
    files that overwrite each other one is left. A rank cannot ask the others here, since it may be
    the only one that saves."""
    frame: Any = sys._getframe()
    level = 1
    while (
        frame.f_globals.get("__name__") != "torch.serialization" or frame.f_code.co_name != "save"
    ):
        frame, level = frame.f_back, level + 1
        if frame is None:
            return  # pickle, which sends an object elsewhere
    path, ranks = _path_of(frame.f_locals.get("f")), current()
    if path is None or ranks.size == 1 or _names(path, ranks.rank):
        return
    warnings.warn(
        f"torch.save to {path!r} writes this rank's shards of global tensors, and the "
        "path does not name the rank: what ranks write to one path overwrites what others wrote. "
        "consistent.checkpoint.save writes what any number of ranks loads, checkpoint.save_full "
        "one whole file; or give each rank a path with its number.",
        stacklevel=level + 1,
    )


def _path_of(f: Any) -> str | None:
    """The path that ``torch.save`` writes to, given a path or an open file; None where ranks have
    no file in common: memory, a temporary file, standard output."""
    if not isinstance(f, str | os.PathLike):
        if isinstance(f, tempfile._TemporaryFileWrapper):
            return None
        f = getattr(f, "name", None)  # a number if it was opened by its descriptor
    if not isinstance(f, str | os.PathLike):
        return None
    path = os.fsdecode(f)
    return None if path.startswith("<") else path


def _names(path: str, rank: int) -> bool:
    """Whether the file or its folder has the number of the rank: model.1.pt, rank_01/model.pt."""
    folder, name = os.path.split(path)
    number = rf"0*{rank}(?!\d)"
    in_name = re.search(rf"(?<!\d){number}", name)
    return bool(in_name or re.fullmatch(rf"(rank|r)?[-_]?{number}", os.path.basename(folder)))


def _carry(old: Any, new: Any) -> None:
    for key, value in old.__dict__.items():
        if key not in OWN:
            new.__dict__[key] = value
    if old._data_given:  # a shallow copy is of the same memory
        new._data_given = True
    if old.requires_grad:
        new.requires_grad_()


def _rebuild(local: Any, layout: Any, saved_at: Any, requires_grad: Any, extra: Any) -> Any:
    """What ``reduce`` wrote; files name this function."""
    return restored(local, layout, saved_at, requires_grad=requires_grad, extra=extra)


# torch.load(weights_only=True) calls only functions that are registered here.
torch.serialization.add_safe_globals([_rebuild])
