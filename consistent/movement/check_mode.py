"""Check mode: before each boxing ranks compare what they do, and raise if they differ.

It is off by default, and then costs reading one bool. Switch it on by ``with check_mode():`` or the
environment variable ``CONSISTENT_CHECK=1``. Every rank must switch it on and off at the same point
of the program.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mirrored.every_rank import agree, all_equal, gather_from_ranks, lines_by_rank
from mirrored.readable import on_one_line
from mirrored.transports import default
from mirrored.transports.faults.place import is_user_frame

from ..spec import Placement, TensorSpec
from .settings import first_difference, settings
from .sparse_parts import is_sparse, tensors_of_sparse

_is_always_on = os.environ.get("CONSISTENT_CHECK", "0") not in ("", "0")
# By rank, because simulated ranks are threads that share this module.
_contexts_by_rank: Counter[int] = Counter()
_lock = threading.RLock()

enabled: bool = _is_always_on
"""True if any rank of this process checks. If check mode is off, nothing else is read."""


class _ThreadState(threading.local):
    op: str = ""


_thread = _ThreadState()


@contextmanager
def check_mode(on: bool = True) -> Iterator[None]:
    """Check each boxing inside the context, so that ranks that run different ops raise.

    Without it ranks that differ would wait for each other forever, or send wrong data. ``on=False``
    changes nothing. Every rank must enter the context at the same point of the program.
    """
    rank = default.current().rank
    _change_context_count(rank, int(on))
    try:
        yield
    finally:
        _change_context_count(rank, -int(on))


def _change_context_count(rank: int, change: int) -> None:
    """Add ``change`` (1, -1 or 0) to the number of ``check_mode`` contexts around ``rank``."""
    global enabled
    with _lock:
        _contexts_by_rank[rank] += change
        enabled = _is_always_on or any(_contexts_by_rank.values())


def _is_on() -> bool:
    return _is_always_on or _contexts_by_rank[default.current().rank] > 0


def set_current_op(op: str) -> None:
    """Note that this thread is in the op ``op``, for the errors about its boxings."""
    _thread.op = op


def current_op() -> str:
    """Return the op that this thread is in, as it was passed to ``set_current_op`` last."""
    return _thread.op


def check_boxing(local: Tensor, src: TensorSpec, dst: TensorSpec) -> None:
    """Check, before each boxing, that all ranks do it and that ``local`` is a shard of ``src``.

    Raises:
        RuntimeError: on every rank, if some rank does another boxing or has a wrong shard.
    """
    _compare_notes(src, dst, _thread.op, _shard_fault(local, src))


def check_route(src: TensorSpec, dst: TensorSpec, op: str = "") -> None:
    """Check that the ranks of both placements are about to do the same boxing, ``src`` to ``dst``.

    Args:
        src: spec before the boxing.
        dst: spec after it.
        op: name of the op, for the error.

    Raises:
        RuntimeError: on every rank; the message names each rank's call site, op and specs.
    """
    _compare_notes(src, dst, op, "")


def check_shard(local: Tensor, spec: TensorSpec, what: str = "") -> None:
    """Raise on every rank if some ``local`` has not the shape and dtype of a shard of ``spec``.

    ``what`` names the op in the error.
    """
    _compare_notes(spec, spec, what, _shard_fault(local, spec))


def _compare_notes(src: TensorSpec, dst: TensorSpec, op: str, fault: str) -> None:
    """Exchange between the ranks what each is about to do, and raise if they differ.

    ``fault`` says what is wrong with this rank's shard; empty if nothing is.
    """
    ranks = _ranks_of_both(src.placement, dst.placement)
    if not _is_on() or default.current().rank not in ranks:
        return
    note = (call_site(), op, f"{src} -> {dst}")
    results = gather_from_ranks((note, fault, settings()), ranks)
    notes, faults, settings_by_rank = zip(*results, strict=True)
    if not all_equal(notes):
        raise RuntimeError(
            "check mode: ranks are about to do different boxings.\n"
            + lines_by_rank([_call_line(*each) for each in notes], ranks)
            + "\n  Every rank must run the same ops in order: look for a branch that some take."
        )
    _check_settings(ranks, settings_by_rank, _call_line(*note))
    if any(faults):
        raise RuntimeError(
            f"check mode: a shard does not fit its spec {src}, in {_call_line(*note)}.\n"
            + lines_by_rank([text or "as its spec says" for text in faults], ranks)
            + "\n  Give from_local the sbp that the shards have, or shards of that shape and dtype."
        )


def _check_settings(ranks: Sequence[int], notes: Sequence[dict[str, str]], line: str) -> None:
    name = first_difference(notes)
    if name is not None:
        raise RuntimeError(
            f"check mode: the {name} differs between ranks, in {line}.\n"
            + lines_by_rank([note.get(name, "none") for note in notes], ranks)
            + "\n  Each rank computes by its own, so that what all have whole would differ. Set it "
            "alike on every rank."
        )


def check_hyperparameters(optimizer: torch.optim.Optimizer, placement: Placement) -> None:
    """Raise on every rank if the hyperparameters of ``optimizer`` differ between ranks.

    Learning rates that differ, for example, would make replicas of a parameter drift apart.
    """
    if not _is_on() or placement.coordinate_of(default.current().rank) is None:
        return
    ranks = tuple(placement.ranks.ravel().tolist())
    notes = gather_from_ranks(_hyperparameters(optimizer), ranks)
    name = first_difference(notes)
    if name is not None:
        raise RuntimeError(
            f"check mode: {name} of {type(optimizer).__name__} differs between ranks, at "
            f"{call_site()}.\n"
            + lines_by_rank([note.get(name, "none") for note in notes], ranks)
            + "\n  Parameters would become others on each rank. Give every rank's optimizer the "
            "same, and the same schedule."
        )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {
        f"{name} of group {k}": str(float(value) if isinstance(value, Tensor) else value)
        for k, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (int, float, str, tuple, type(None)))
        or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _ranks_of_both(first: Placement, second: Placement) -> tuple[int, ...]:
    """Return the ranks of both placements, each once."""
    ranks = first.ranks.ravel().tolist()
    return tuple(ranks if first == second else sorted({*ranks, *second.ranks.ravel().tolist()}))


def check_equal(tensor: Tensor, placement: Placement, what: str) -> None:
    """Raise on every rank if ``tensor``, which counts as replicated, differs between ranks.

    ``tensor`` is a plain tensor. The check is made in check mode only. ``what`` names the tensor in
    the error.
    """
    rank = default.current().rank
    if not _is_on() or placement.coordinate_of(rank) is None:
        return
    ranks = tuple(placement.ranks.ravel().tolist())
    agree(
        digest(tensor),
        lambda digests: RuntimeError(
            f"check mode: {what} is taken as broadcast, and the ranks' values differ.\n"
            f"  at {call_site()}:\n"
            + lines_by_rank(digests, ranks)
            + "\n  Make it equal (same seed, same data), or give its SBP with from_local."
        ),
        ranks=ranks,
    )


def digest(tensor: Tensor) -> str:
    """Return dtype, shape and a hash of the values as text, by which ranks compare tensors.

    ``torch.float32 (2, 3) hash 1f0c...``. Equal values give the same text whatever their strides
    are.
    """
    with torch._C.DisableTorchFunctionSubclass():
        x = torch.Tensor.detach(tensor)
        description = f"{x.dtype} {tuple(x.shape)}"
        if x.is_meta:
            return f"{description} meta"
        if is_sparse(x):
            return f"{description} of {' and '.join(map(digest, tensors_of_sparse(x)))}"
        if x.layout is not torch.strided or x.is_quantized:
            return f"{description} {x.layout}"
        x = x.cpu().resolve_conj().resolve_neg().contiguous()
        # A contiguous tensor may have any stride along a dim of size 1.
        flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
        hashed = hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
        return f"{description} hash {hashed}"


def _shard_fault(local: Tensor, spec: TensorSpec) -> str:
    """Return what is wrong with ``local`` as this rank's shard of ``spec``; empty if nothing is."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = tuple(torch.Tensor.size(local)), local.dtype
    expected_shape = spec.local_shape(spec.placement.coordinate_of(default.current().rank))
    if shape == expected_shape and dtype == spec.dtype:
        return ""
    return f"holds {dtype} {shape}, and its spec says {spec.dtype} {expected_shape}"


def _call_line(site: str, op: str, specs: str) -> str:
    return f"{op + ' ' if op else ''}at {site}: {specs}"


def call_site() -> str:
    """Return ``file:line`` of the innermost frame outside this library, torch and Python itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            return f"{on_one_line(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward, in a thread of the autograd engine"
