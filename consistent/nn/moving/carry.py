"""Allocate a job's new shards, fill them by messages, and put them in place of the old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mirrored.transports.default import current

from ...dispatch import _C
from ...dispatch.plans.shards import HookOff, attach
from ...movement.run import run
from ...movement.run_exchanges import run_exchanges
from ...movement.world import device_of, my_coordinate
from ...spec import TensorSpec
from ...spec.tracer import callbacks
from ..sharded.master_weights import masters_of
from .job import JobToMove, TensorMove, params_of

_ON_MOVE = callbacks("on_move")


class PendingMove:
    """New shards of a training job's tensors, before they replace the old ones in a ``move``.

    Making an instance allocates the shards. Nothing is sent before ``send``, and nothing in the job
    changes before ``commit``.

    Args:
        job: the job, with the specs of its tensors before and after the move.
    """

    def __init__(self, job: JobToMove) -> None:
        self.job = job
        self._items = job.tensors()
        _check_unused(job)
        self._old_shards = [_plain_shard(item.tensor) for item in self._items]
        self._new_shards = [
            _allocate_shard(x, item) for x, item in zip(self._old_shards, self._items, strict=True)
        ]
        self._new_plain: dict[str, Tensor] = {}

    def send(self, plain_names: Sequence[str]) -> None:
        """Fill the new shards from the old ones of all ranks, and broadcast some plain tensors.

        Args:
            plain_names: the plain tensors that joining ranks lack. The first rank of the old
                placement sends them.
        """
        complete_indices = [i for i, item in enumerate(self._items) if not _is_partial(item.src)]
        run_exchanges(
            [self._old_shards[i] for i in complete_indices],
            [(self._items[i].src, self._items[i].dst) for i in complete_indices],
            [self._new_shards[i] for i in complete_indices],
        )
        for i, item in enumerate(self._items):
            if _is_partial(item.src):
                self._new_shards[i] = run(self._old_shards[i], item.src, item.dst)
        all_ranks, sender = tuple(range(current().size)), self.job.old.first_rank
        for name in plain_names:
            x = self.job.plain[name]
            value = x.detach().contiguous() if current().rank == sender else None
            received = current().broadcast(
                value, tuple(x.shape), x.dtype, x.device, sender, all_ranks
            )
            self._new_plain[name] = received

    @torch.no_grad()
    def commit(self) -> None:
        """Replace the shards of all tensors of the job by the new ones, without communication."""
        job = self.job
        kept_masters = [
            (masters, p)
            for optimizer in job.optimizers
            if (masters := masters_of(optimizer)) is not None
            for p in dict.fromkeys(params_of(optimizer))
            if masters.is_current(p)
        ]
        for position in job.grads:
            _C.set_gradient(job.params[position].tensor, None)
        for item, local in zip(self._items, self._new_shards, strict=True):
            _replace_shard(item.tensor, local, item.dst)
        for position, grad in job.grads.items():
            _C.set_gradient(job.params[position].tensor, grad.tensor)
        for name, x in self._new_plain.items():
            job.plain[name].copy_(x)
        for masters, p in kept_masters:
            masters.mark_current(p)
        for notify in _ON_MOVE:
            notify()

    def rewatch_parameters(self) -> None:
        """Register the moved parameters again for gradient reduction over the new ranks.

        Called last in a move. Gradients are reduced in the order in which their parameters were
        registered, which must be the same on all ranks. Parameters whose ranks did not change are
        therefore registered again, too.
        """
        leaves = [each.tensor for each in self.job.params if each.tensor.requires_grad]
        for leaf in leaves:
            _C.unwatch(leaf)
        for leaf in leaves:
            _C.watch_if_leaf(leaf)


def _is_partial(spec: TensorSpec) -> bool:
    return any(entry.is_partial for entry in spec.sbp)


def _allocate_shard(old: Tensor, item: TensorMove) -> Tensor:
    """Return memory for this rank's new shard; the old shard itself if it has the same elements.

    Args:
        old: the old shard.
        item: the tensor, with its specs before and after the move.
    """
    src, dst = item.src, item.dst
    at, to = my_coordinate(src.placement), my_coordinate(dst.placement)
    if to is None:
        return torch.empty(dst.local_shape(None), dtype=dst.dtype, device="meta")
    if _is_partial(src):
        return old  # not used: ``run`` returns the new shard of a partial sum
    same_device = src.placement.type == dst.placement.type
    if at is not None and same_device and src.runs(at) == dst.runs(to):
        return old
    return torch.empty(dst.local_shape(to), dtype=dst.dtype, device=device_of(dst.placement))


def _plain_shard(x: Any) -> Tensor:
    """Return the shard of ``x`` as a plain tensor that shares its storage, outside any graph."""
    with HookOff():
        return torch.Tensor.data.__get__(x)  # type: ignore[attr-defined]


def _check_unused(job: JobToMove) -> None:
    """Raise if an autograd graph or a view still uses a tensor of the job.

    The move would change the tensor under that graph or view.

    Raises:
        RuntimeError: a tensor is in use; the message names it.
        ValueError: a tensor is not strided.
    """
    for item in job.tensors():
        x = item.tensor
        if x.layout is not torch.strided:
            raise ValueError(
                f"move: {item.name} is {x.layout}, and move takes strided tensors. Call "
                "optimizer.zero_grad() before the move, if it is a gradient."
            )
        if x.requires_grad and not x.is_leaf:
            raise RuntimeError(
                f"move: {item.name} is the result of a graph, as gradients are after backward("
                "create_graph=True), and after the move no backward would reach it. Call "
                "backward on what was computed from it and then optimizer.zero_grad(), or "
                "detach_() it."
            )
        with HookOff():
            # References that are expected: the tensor's own Python object, the accumulate-grad
            # node of a leaf, and the leaf if ``x`` is its gradient.
            holders = 1 + (x.requires_grad and x.is_leaf) + (item in job.grads.values())
            count = torch.Tensor._use_count(x)  # type: ignore[attr-defined]
        if count > holders:
            raise RuntimeError(
                f"move: {item.name} is still in use by a graph of which backward has not been "
                "called, or by a view of it such as x[0]. Call loss.backward() first, let go what "
                "a forward has returned (del logits), or run it under torch.no_grad()."
            )


def _replace_shard(x: Any, local: Tensor, spec: TensorSpec) -> None:
    """Make the object ``x`` a global tensor with another shard and spec.

    Assigning torch's ``data`` cannot move a tensor from or to ``meta``, so the two Python objects
    swap their tensors. Hooks of ``x`` stay.

    Args:
        x: the global tensor.
        local: its new shard.
        spec: its new spec.
    """
    with HookOff():
        is_leaf = x.requires_grad and x.is_leaf
        hooks, later_hooks = x._backward_hooks, x._post_accumulate_grad_hooks
        if is_leaf:
            local.requires_grad_()
        torch._C._swap_tensor_impl(x, local)  # type: ignore[attr-defined]
        if is_leaf:  # hooks are stored with the tensor that was swapped out
            x._backward_hooks, x._post_accumulate_grad_hooks = hooks, later_hooks
            _C.unwatch(local)
            local.register_hook(_raise_stale_graph)
        # A graph may still hold the old tensor; this frees its memory.
        local.data = torch.empty(0, dtype=local.dtype, device=local.device)
    attach(x, spec)
    x.__dict__.pop("_moved_view", None)


def _raise_stale_graph(_: Any) -> NoReturn:
    """Raise in the backward of a graph from before the move; a hook of the old tensor."""
    raise RuntimeError(
        "backward: this graph was made before consistent.move took its parameters elsewhere. Call "
        "backward before the move, or compute the loss again after it."
    )
