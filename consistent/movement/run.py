"""Execution of a boxing: each move of its plan becomes a collective, or a local copy, on the shard.

Tensors in and out are plain and autograd is not involved. A rank outside the placement holds a
``meta`` tensor and gets one of the new shape, without communication. Between placements the ranks
of the source do the moves before the exchange, and the ranks of the target the moves after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import Tensor

from mirrored import collectives
from mirrored.reduction import identity
from mirrored.transports.default import current
from mirrored.transports.failures import counts_out_of_memory

from ..boxing.plan import plan
from ..boxing.steps import Exchange, Move, Step
from ..spec import B, Coordinate, Partial, Sbp, Split, TensorSpec, piece
from ..spec.tracer import callbacks
from . import check_mode
from .recut import convert_split, embed_runs, in_logical_order, in_rank_order, select_runs
from .run_exchange import run_exchange
from .run_sparse import run_sparse
from .sparse_parts import meta_like, to_dense
from .world import my_coordinate

_ON_BOXING_BEGIN, _ON_BOXING_END = callbacks("on_boxing_begin"), callbacks("on_boxing_end")

_Action = Callable[[Tensor], Tensor]
_is_alias_of = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]

# Without the block layouts (BSR, BSC), because a split may cut through a block.
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc)


@counts_out_of_memory
def run(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """Return this rank's shard under ``dst``, from its shard ``local`` under ``src``.

    Autograd does not record it (``boxed.box`` does). All ranks of both placements call it. The
    result is contiguous and never shares memory with ``local``, except that boxing ``src`` to
    itself returns ``local``.
    """
    if src is dst:
        return local
    if local.layout in _COMPRESSED and src.placement == dst.placement:
        if local.is_meta:
            return meta_like(local, dst.local_shape(None), dst.dtype)
        # As COO, in which each entry has its own indices, which `run_sparse` sends along.
        out = run(local.detach().to_sparse(), src, dst)
        return out.to_sparse(layout=local.layout)
    x, moves = begin_boxing(local, src, dst)
    if src.placement is dst.placement or src.placement == dst.placement:
        out = run_within(x, src, dst)
        if _sends_entries(x, src, dst):
            return out  # `run_sparse` has notified tracers of each move
    else:
        (exchange_move,) = (move for move in moves if isinstance(move, Exchange))
        received = run_exchange(
            run_within(x, src, exchange_move.src), exchange_move.src, exchange_move.dst
        )
        out = run_within(received, exchange_move.dst, dst)
    notify_end((src, dst))
    return out


def begin_boxing(
    local: Tensor, src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...] | None = None
) -> tuple[Tensor, tuple[Step, ...]]:
    """Begin a boxing: check it, notify tracers, and return (the detached shard, the steps).

    Each boxing calls it once, before anything is sent. Tracers are callbacks that observe a
    program, such as those of reports. For a boxing that sends the entries of a sparse shard they
    are notified later, when ranks know how many entries there are. A sparse shard is returned as a
    dense one, unless it is COO and stays on its placement.

    Args:
        local: this rank's shard under ``src``.
        src: spec before the boxing.
        dst: spec after it.
        moves: the steps, if they are not those of ``plan``: a codec sends fewer bytes.
    """
    if check_mode.enabled:
        check_mode.check_boxing(local, src, dst)
    moves = plan(src, dst) if moves is None else moves
    if not _sends_entries(local, src, dst):
        for notify in _ON_BOXING_BEGIN:
            notify(src, dst, moves)
    x = local.detach()
    # Torch represents some zero gradients without memory (ZeroTensor), which cannot be sent.
    x = x.clone() if x._is_zerotensor() else x
    entries = x.layout is torch.sparse_coo and src.placement == dst.placement
    return x if entries else to_dense(x), moves


def _sends_entries(x: Tensor, src: TensorSpec, dst: TensorSpec) -> bool:
    """Return whether a boxing sends the entries of a sparse ``x``, not its dense form."""
    if x.layout is not torch.sparse_coo or src.placement != dst.placement:
        return False
    return not (src.layout.is_cut or dst.layout.is_cut)


def notify_end(*routes: tuple[TensorSpec, TensorSpec]) -> None:
    """Notify tracers, the observers of a program, that boxings have ended.

    ``routes`` are (src, dst) of each, in the order in which they began.
    """
    for notify in _ON_BOXING_END:
        for src, dst in reversed(routes):
            notify(src, dst)


@contextmanager
def addends(
    local: Tensor, src: TensorSpec, dst: TensorSpec
) -> Iterator[tuple[list[Tensor], int, int, int]]:
    """Box a shard up to the last addition of a reduce-scatter, which the caller does itself.

    So the caller can fuse the addition with the op that follows it. The plan from ``src`` to
    ``dst`` must end in a reduce-scatter.

    Yields (tensors, dim, start, size): this rank's shard is the part [start, start + size) along
    ``dim`` of the sum of the tensors, added in order. They may be read only inside the context.
    """
    x, moves = begin_boxing(local, src, dst)
    coordinate, last_move = my_coordinate(src.placement), moves[-1]
    assert isinstance(last_move, Move) and isinstance(last_move.dst, Split)
    dim, axis = last_move.dst.dim, last_move.axis
    if coordinate is None:
        shape = dst.local_shape(None)
        yield [torch.empty(shape, dtype=dst.dtype, device="meta")], dim, 0, shape[dim]
        return
    entries = list(dst.sbp)
    entries[axis] = last_move.src
    before = dst.with_sbp(tuple(entries))
    x, parts = run_within(x, src, before), dst.placement.shape[axis]
    # The dim is whole along the axis, so its sizes are those that the axis splits it into.
    sizes = [piece(x.shape[dim], parts, k)[1] for k in range(parts)]
    ranks = dst.placement.axis_ranks(axis, coordinate)
    if parts == 1:
        yield [x], dim, 0, x.shape[dim]
        return
    with current().addends(x, dim, sizes, ranks) as (tensors, start):
        yield tensors, dim, start, sizes[coordinate[axis]]


def run_within(x: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """Return this rank's shard under ``dst``, from its shard ``x`` under ``src``.

    Both specs are on one placement. Unlike ``run`` it does not check the boxing or notify tracers:
    the caller has called ``begin_boxing``.
    """
    coordinate = my_coordinate(src.placement)
    if src is dst:
        return x
    if coordinate is None:
        return meta_like(x, dst.local_shape(None), dst.dtype)
    if x.layout is torch.sparse_coo:
        if _sends_entries(x, src, dst):
            return run_sparse(x, src, plan(src, dst), coordinate)
        return run_within(x.to_dense(), src, dst).to_sparse(x.sparse_dim())
    out = x
    for step in _step_functions(src, dst, coordinate):
        out = step(out)
    # Slices and kept values are views until here, so that a plan of several moves copies once.
    if _is_alias_of(out, x) or not out.is_contiguous():
        out = out.clone(memory_format=torch.contiguous_format)
    return out


@lru_cache(maxsize=1 << 11)
def _step_functions(
    src: TensorSpec, dst: TensorSpec, coordinate: Coordinate
) -> tuple[_Action, ...]:
    """Return the functions that, applied in order, box one rank's shard from ``src`` to ``dst``.

    ``coordinate`` is that of the rank in the placement.
    """
    steps, state = [], src
    for move in plan(src, dst):
        if isinstance(move, Exchange):  # on one placement an exchange is the whole plan
            return (partial(run_exchange, src=src, dst=dst),)
        steps.append(_step_function(state, move, coordinate))
        entries = list(state.sbp)
        entries[move.axis] = move.dst
        state = state.with_sbp(tuple(entries))
    return tuple(steps)


def _step_function(state: TensorSpec, move: Move, coordinate: Coordinate) -> _Action:
    """Return the function that does ``move`` on the shard of the rank at ``coordinate``.

    ``state`` is the spec before the move.
    """
    axis = move.axis
    parts, index = state.placement.shape[axis], coordinate[axis]
    if parts == 1:
        return _unchanged
    ranks = state.placement.axis_ranks(axis, coordinate)
    # Shape of the box that the ranks of the axis hold together. The moving axis is the innermost
    # one on its dim, so replacing its entry by B gives that box.
    entries = list(state.sbp)
    entries[axis] = B
    whole = state.with_sbp(tuple(entries)).local_shape(coordinate)

    src, dst = (e if isinstance(e, Split) else None for e in (move.src, move.dst))
    match move.kind:
        case "all_to_all" if src is not None and dst is not None and src.dim == dst.dim:
            return partial(
                convert_split, src=src, dst=dst, n=whole[src.dim], index=index, ranks=ranks
            )
        case "all_gather" | "all_reduce" | "reduce_scatter" | "all_to_all":
            collective = _collective_function(move, whole, ranks)
            if (src is None or src.cut is None) and (dst is None or dst.cut is None):
                return collective
            return partial(_run_in_rank_order, collective=collective, src=src, dst=dst, parts=parts)
        case "slice":
            assert dst is not None
            return partial(select_runs, dim=dst.dim, runs=dst.runs(whole[dst.dim], parts, index))
        case "keep_first":
            return _unchanged if index == 0 else _zeros_like
        case "keep":
            return _unchanged
        case _:
            assert src is not None
            # S -> P: pad this rank's piece with the value that the reduction ignores.
            fill = identity(state.dtype, _reduce_op(move))
            runs = src.runs(whole[src.dim], parts, index)
            return partial(embed_runs, dim=src.dim, runs=runs, total=whole[src.dim], rest=fill)


def _reduce_op(move: Move) -> str:
    """Return "sum", "max" or "min", by which ``move`` reduces; "" if no side is partial."""
    return next((e.op for e in (move.src, move.dst) if isinstance(e, Partial)), "")


def _collective_function(move: Move, whole: Sequence[int], ranks: tuple[int, ...]) -> _Action:
    """Return the collective that carries out ``move``, as a function of the shard.

    ``whole`` is the shape of what ``ranks`` hold together.
    """

    def split_dim_and_sizes(entry: Sbp) -> tuple[int, tuple[int, ...]]:
        """Return the dim that ``entry`` splits, and the size of each rank's part along it."""
        assert isinstance(entry, Split)
        n, parts = whole[entry.dim], len(ranks)
        return entry.dim, tuple(entry.size(n, parts, k) for k in range(parts))

    match move.kind:
        case "all_gather":
            dim, sizes = split_dim_and_sizes(move.src)
            return partial(collectives.all_gather, dim=dim, sizes=sizes, ranks=ranks)
        case "all_reduce":
            return partial(collectives.all_reduce, ranks=ranks, op=_reduce_op(move))
        case "reduce_scatter":
            dim, sizes = split_dim_and_sizes(move.dst)
            kind = {"ranks": ranks, "op": _reduce_op(move)}
            return partial(collectives.reduce_scatter, dim=dim, sizes=sizes, **kind)
        case _:
            (i, joined), (j, cut) = split_dim_and_sizes(move.src), split_dim_and_sizes(move.dst)
            return partial(
                collectives.all_to_all,
                split_dim=j, split_sizes=cut, concat_dim=i, concat_sizes=joined, ranks=ranks,
            )  # fmt: skip


def _run_in_rank_order(
    x: Tensor, collective: _Action, src: Split | None, dst: Split | None, parts: int
) -> Tensor:
    """Apply ``collective``, made for balanced splits, where a split has a cut such as zigzag.

    The items are put in rank order before it, and back in logical order after it, so that those of
    each rank are contiguous while it runs.

    Args:
        x: this rank's shard.
        collective: the collective.
        src: split before the move, or None if it begins in B or P.
        dst: split after it, or None if it ends in B or P.
        parts: number of ranks.
    """
    out = collective(x if dst is None else in_rank_order(x, dst, parts))
    return out if src is None else in_logical_order(out, src, parts)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
