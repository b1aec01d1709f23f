"""Boxing in fewer bytes: a codec encodes a shard before it is sent, and all ranks decode it.

```
gather     x  -encode->  bytes  ==all-gather==>  bytes of all ranks  -decode->  B      one message
reduce     g + unsent  -encode->  bytes by rank  ==all-to-all==>  -decode, sum in order->  S
           unsent = g + unsent - decoded bytes                                    stays on this rank
sum        reduce, then gather of what each rank has added up, by the same codec: P -> B
```

The module ``several`` does the same boxings without codecs. A module's parallelization plan decides
which of the two sends a parameter. Boxings other than a single all-gather or reduce-scatter are
never encoded; this follows from specs, so it is the same on all ranks. ``boxed`` makes both
differentiable.

A codec rounds. The *unsent rest* is the rounding error of a gradient, which this rank adds to its
next gradient (error feedback). A rank decodes its own part from bytes, as others do. So all ranks
have the same bits, and a sum does not depend on which of them makes it. The error of the second
rounding of a sum is kept by the rank that has added it up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrored.codecs import Codec
from mirrored.comm import Ranks, Waitable, resize_dim
from mirrored.transports.default import current
from mirrored.transports.failures import counts_out_of_memory

from ..boxing.plan import plan
from ..boxing.steps import Move, Step
from ..spec import piece
from .coders import Coder, with_coded_bytes
from .low_rank import LowRank, as_matrix, orthonormalize, part_of_product
from .run import begin_boxing, notify_end
from .several import (
    Collective,
    Route,
    StartedBoxings,
    run_several,
    single_collective_of,
    start_several,
)

Coders = Sequence[Coder | None]


class _Item(NamedTuple):
    """One of several tensors that are sent together by codecs.

    ``position`` is its index among them, ``collective`` says how it is divided among the ranks,
    ``coder`` has its codecs, and ``whole_shape`` is the shape of all ranks' parts together.
    """

    position: int
    x: Tensor
    collective: Collective
    coder: Coder
    whole_shape: tuple[int, ...]

    def shapes(self) -> list[list[int]]:
        """Return the shape of each rank's part, in the order of the ranks."""
        return [
            resize_dim(self.whole_shape, self.collective.dim, size)
            for size in self.collective.sizes
        ]


_Send = Callable[[list[_Item], Ranks], Waitable]


@counts_out_of_memory
def gather_each(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders, begun: bool = False
) -> list[Tensor]:
    """Gather each shard from its source to its target spec, compressed if its coder has a codec.

    Args:
        locals_: this rank's shards.
        routes: (src, dst) of each.
        coders: the codecs of each, or None to send it as it is.
        begun: whether ``begin_gathers`` has been called for the shards.
    """
    if not any(coders):
        return run_several(locals_, routes, None, begun)
    results = _start_gathers(locals_, routes, coders, begun).wait()
    if not begun:
        notify_end(*routes)
    return results


@counts_out_of_memory
def start_gathers(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders
) -> StartedBoxings:
    """Start ``gather_each`` and return without waiting.

    Shards may not be written to until the results are there.
    """
    if not any(coders):
        return start_several(locals_, routes)
    return _start_gathers(locals_, routes, coders, False)


def _start_gathers(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders, is_begun: bool
) -> StartedBoxings:
    codecs = [None if coder is None else coder.gather for coder in coders]
    return _start_coded("all_gather", _gather, (locals_, routes, coders, codecs), is_begun)


@counts_out_of_memory
def start_reduces(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders
) -> StartedBoxings:
    """Start a reduce-scatter of each shard from its source to its target spec, and do not wait.

    The addends of a shard are compressed if its coder has a codec for sums.
    """
    codecs = [None if coder is None else coder.reduce for coder in coders]
    return _start_coded("reduce_scatter", _reduce, (locals_, routes, coders, codecs), False)


@counts_out_of_memory
def start_sums(addends: Sequence[Tensor], coders: Sequence[Coder], ranks: Ranks) -> CodedSums:
    """Start the all-reduce of each of ``addends`` over ``ranks``, compressed by its coder.

    Addends are contiguous, and may not be written to before the sums are there. Each coder adds its
    *unsent rest*, the rounding errors of earlier addends, and keeps the new one; that has one dim,
    except for a low-rank codec, where it has the shape of the addend.
    """
    items_by_kind: dict[bool, list[_Item]] = {}
    for i, (x, coder) in enumerate(zip(addends, coders, strict=True)):
        is_low_rank = isinstance(coder.reduce, LowRank)
        items_by_kind.setdefault(is_low_rank, []).append(
            _all_reduce_item(i, x if is_low_rank else x.view(-1), coder, ranks)
        )
    two_step_sums = [
        (
            [item.position for item in items],
            _start_low_rank_sum(items, ranks) if low_rank else _start_sum(items, ranks),
        )
        for low_rank, items in items_by_kind.items()
    ]
    return CodedSums(addends, two_step_sums)


def _all_reduce_item(position: int, x: Tensor, coder: Coder, ranks: Ranks) -> _Item:
    """Return the item for an all-reduce of ``x``, whose dim 0 is divided evenly among ``ranks``."""
    sizes = tuple(piece(len(x), len(ranks), k)[1] for k in range(len(ranks)))
    return _Item(position, x, Collective("all_reduce", ranks, 0, sizes), coder, tuple(x.shape))


class CodedSums:
    """All-reduces in flight that codecs compress, as ``start_sums`` returns them.

    Each takes two messages, and ``send_second`` is called between them. First a rank gets the
    addends of its part, and then it sends their sum to all ranks. A low-rank codec sums one thin
    matrix in each.
    """

    def __init__(
        self, addends: Sequence[Tensor], two_step_sums: list[tuple[list[int], _TwoStepSum]]
    ) -> None:
        self._shapes = [x.shape for x in addends]
        self._two_step_sums = two_step_sums

    def send_second(self) -> None:
        """Wait for the first messages, sum what they contain, and send the second."""
        for _, two_step_sum in self._two_step_sums:
            two_step_sum.send_second()

    def wait(self) -> list[Tensor]:
        """Wait for the second messages; return the sums, with the same bits on every rank."""
        sums: list[Any] = [None] * len(self._shapes)
        for positions, two_step_sum in self._two_step_sums:
            for i, x in zip(positions, two_step_sum.wait(), strict=True):
                sums[i] = x.view(self._shapes[i])
        return sums


def _start_coded(kind: str, send: _Send, columns: tuple, is_begun: bool) -> StartedBoxings:
    """Start a boxing of each shard: by ``send`` where a codec can compress it, else in full.

    Args:
        kind: kind of the collective, "all_gather" or "reduce_scatter".
        send: function that sends several items over the same ranks.
        columns: (shards, routes, coders, codecs), each a sequence.
        is_begun: whether each boxing was begun (``run.begin_boxing``) already.
    """
    items_by_key: dict[tuple, list[_Item]] = {}
    plain_positions: list[int] = []
    for i, (x, route, coder, codec) in enumerate(zip(*columns, strict=True)):
        collective = _coded_collective(x, route, codec, kind)
        if collective is None:
            plain_positions.append(i)
            continue
        x = (
            x
            if is_begun
            else begin_boxing(x, *route, moves=_coded_moves(x, route, collective, codec))[0]
        )
        key = (collective.ranks, x.device, isinstance(codec, LowRank))
        items_by_key.setdefault(key, []).append(
            _Item(i, x, collective, coder, _whole_shape(x, collective))
        )
    handles: list[tuple[list[int], Any]] = []
    if plain_positions:
        xs, routes = ([columns[k][i] for i in plain_positions] for k in (0, 1))
        handles.append((plain_positions, _start_plain(xs, routes, is_begun)))
    for (ranks, _, low_rank), items in items_by_key.items():
        handle = (_start_low_rank_sum if low_rank else send)(items, ranks)
        handles.append(([item.position for item in items], handle))
    return StartedBoxings([None] * len(columns[0]), handles)


def begin_gathers(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders
) -> list[Tensor]:
    """Begin each boxing, and return the shards to pass to ``gather_each(begun=True)``.

    To begin is to check the boxing and to notify tracers (``run.begin_boxing``). A caller that
    sends later, in another thread, does that first in the thread of the program.
    """
    shards = []
    for x, route, coder in zip(locals_, routes, coders, strict=True):
        codec = None if coder is None else coder.gather
        collective = _coded_collective(x, route, codec, "all_gather")
        moves = None if collective is None else _coded_moves(x, route, collective, codec)
        shards.append(begin_boxing(x, *route, moves=moves)[0])
    return shards


def _coded_collective(x: Tensor, route: Route, codec: Any, kind: str) -> Collective | None:
    """Return the collective by which ``codec`` can box ``x``, or None if it cannot.

    It cannot without a codec, for a sparse ``x``, or if the boxing is not one collective of
    ``kind``.
    """
    collective = (
        None if codec is None or x.layout is not torch.strided else single_collective_of(route)
    )
    return collective if collective is not None and collective.kind == kind else None


def _whole_shape(x: Tensor, collective: Collective) -> tuple[int, ...]:
    """Return the shape of all ranks' parts together, given ``x``, one rank's part or the whole."""
    return tuple(resize_dim(x.shape, collective.dim, sum(collective.sizes)))


def _coded_moves(x: Tensor, route: Route, collective: Collective, codec: Any) -> tuple[Step, ...]:
    """Return the one move of a boxing, with the bytes that it sends if ``codec`` is used."""
    (move,) = plan(*route)
    assert isinstance(move, Move)
    sizes = [math.prod(resize_dim(x.shape, collective.dim, size)) for size in collective.sizes]
    return (with_coded_bytes(move, codec, sizes, _whole_shape(x, collective)),)


def _start_plain(xs: list[Tensor], routes: list[Route], is_begun: bool) -> StartedBoxings:
    """Start the boxings of shards that no codec compresses."""
    return (
        StartedBoxings(run_several(xs, routes, None, True), [])
        if is_begun
        else start_several(xs, routes)
    )


class _DecodeHandle:
    """A message in flight; ``wait`` waits for it and returns what ``decode`` makes of it."""

    def __init__(self, transfer: Waitable, decode: Callable[[Any], list[Tensor]]) -> None:
        self._transfer, self._decode = transfer, decode

    def wait(self) -> list[Tensor]:
        with torch.no_grad():
            return self._decode(self._transfer.wait())


class _TwoStepSum:
    """The first of two messages in flight, the second of which depends on what arrives.

    ``send_second`` waits for the first and calls ``send_on`` with its content, which sends the
    second; ``wait`` waits for the second.
    """

    def __init__(self, transfer: Waitable, send_on: Callable[[Any], Waitable]) -> None:
        self._transfer, self._send_on = transfer, send_on
        self._second_transfer: Waitable | None = None

    def send_second(self) -> None:
        if self._second_transfer is None:
            with torch.no_grad():
                self._second_transfer = self._send_on(self._transfer.wait())

    def wait(self) -> list[Tensor]:
        self.send_second()
        assert self._second_transfer is not None
        return self._second_transfer.wait()


# ---- gathers -------------------------------------------------------------------------------------


def _gather(items: list[_Item], ranks: Ranks) -> Waitable:
    """Encode this rank's items and start gathering them over ``ranks``."""
    codecs = [_gather_codec(item) for item in items]
    return _start_gather(items, codecs, [c.write(i.x) for c, i in zip(codecs, items)], ranks)


def _start_gather(
    items: list[_Item], codecs: list[Codec], messages: list[Tensor], ranks: Ranks
) -> Waitable:
    """Start gathering the parts of each item from all ranks.

    ``messages`` are this rank's own parts, encoded by ``codecs``. Waiting returns the whole
    tensors.
    """
    sizes = [
        [codec.nbytes(math.prod(shape)) for shape in item.shapes()]
        for codec, item in zip(codecs, items, strict=True)
    ]
    transfer = current().start_all_gather_several(messages, [0] * len(items), sizes, ranks)

    def decode(messages_of_all: list[Tensor]) -> list[Tensor]:
        return [
            _decode_whole(*args) for args in zip(items, codecs, messages_of_all, sizes, strict=True)
        ]

    return _DecodeHandle(transfer, decode)


def _gather_codec(item: _Item) -> Codec:
    assert item.coder.gather is not None
    return item.coder.gather


def _decode_whole(item: _Item, codec: Codec, message: Tensor, sizes: list[int]) -> Tensor:
    """Return the whole tensor of ``item``, decoded from the bytes of all ranks.

    ``message`` is the concatenation of these bytes, and ``sizes`` are their numbers by rank.
    """
    parts = [
        codec.read([part], math.prod(shape), item.x.dtype).view(shape)
        for part, shape in zip(message.split(sizes), item.shapes(), strict=True)
    ]
    return torch.cat(parts, item.collective.dim)


# ---- reduce-scatters -----------------------------------------------------------------------------


def _reduce(items: list[_Item], ranks: Ranks) -> Waitable:
    """Encode this rank's addends and start a reduce-scatter of them; waiting returns its parts."""
    position = ranks.index(current().rank)
    encoded = [_encode_addend(item) for item in items]
    pieces = [torch.cat([parts[k] for parts in encoded]) for k in range(len(ranks))]
    # All ranks cut an addend in the same way, so each sends this rank as many bytes as it keeps.
    transfer = current().start_all_to_all(pieces, [pieces[position].shape] * len(ranks), ranks)
    sizes = [parts[position].numel() for parts in encoded]

    def decode(received: list[Tensor]) -> list[Tensor]:
        messages_by_item = zip(*(message.split(sizes) for message in received), strict=True)
        return [
            _decode_sum(item, position, messages)
            for item, messages in zip(items, messages_by_item, strict=True)
        ]

    return _DecodeHandle(transfer, decode)


@torch.no_grad()
def _encode_addend(item: _Item) -> list[Tensor]:
    """Encode this rank's addend plus its unsent rest; return the bytes for each rank.

    The unsent rest is the rounding errors of earlier addends. It is replaced by that of this one.
    """
    codec, (dim, sizes) = _reduce_codec(item), (item.collective.dim, item.collective.sizes)
    parts = zip(item.x.split(sizes, dim), item.coder.unsent_parts(sizes, dim), strict=True)
    return [codec.write(part, unsent) for part, unsent in parts]


def _reduce_codec(item: _Item) -> Codec:
    codec = item.coder.reduce
    assert codec is not None and not isinstance(codec, LowRank)
    return codec


def _decode_sum(item: _Item, position: int, messages: Sequence[Tensor]) -> Tensor:
    """Return this rank's part of a sum, decoded and added up from the messages of all ranks.

    ``position`` is that of this rank among the ranks of the sum.
    """
    shape = item.shapes()[position]
    return _reduce_codec(item).read(messages, math.prod(shape), item.x.dtype).view(shape)


def _start_sum(items: list[_Item], ranks: Ranks) -> _TwoStepSum:
    """Start an all-reduce of the items: the reduce-scatter first, then a gather of its result."""
    position = ranks.index(current().rank)

    def send_on(parts: list[Tensor]) -> Waitable:
        messages = [_encode_sum(*args, position) for args in zip(items, parts, strict=True)]
        return _start_gather(items, [_reduce_codec(item) for item in items], messages, ranks)

    return _TwoStepSum(_reduce(items, ranks), send_on)


def _encode_sum(item: _Item, part: Tensor, position: int) -> Tensor:
    """Encode ``part``, the part of a sum that this rank has added up, to send it to all ranks.

    The rounding error is added to the coder's unsent rest, and so goes into this rank's next
    addend.
    """
    unsent = item.coder.unsent_parts(item.collective.sizes, item.collective.dim)[position]
    if unsent is None:
        return _reduce_codec(item).write(part)
    rounding_error = torch.zeros_like(part, dtype=unsent.dtype)
    message = _reduce_codec(item).write(part, rounding_error)
    # In place, since `unsent` is a view of the coder's unsent rest.
    unsent += rounding_error
    return message


# ---- sums of low rank -------------------------------------------------------------------------


@torch.no_grad()
def _start_low_rank_sum(items: list[_Item], ranks: Ranks) -> _TwoStepSum:
    """Start sums of matrices over ranks, each sent as a product of thin matrices p and q.

    The first message sums p over ranks, the second q; ``low_rank`` has the method (PowerSGD).
    """
    totals = [item.coder.with_unsent(item.x) for item in items]
    ms = [as_matrix(total) for total in totals]
    ps = [item.coder.times_basis(m) for m, item in zip(ms, items, strict=True)]
    codecs = [_low_rank_codec(item).thin for item in items]
    position = ranks.index(current().rank)

    def send_on(summed: list[Tensor]) -> Waitable:
        # The same on every rank, because the sums have the same bits on every rank.
        bases = [orthonormalize(p) for p in summed]
        own_qs = [m.T @ p for m, p in zip(ms, bases, strict=True)]
        q_sums = _ThinSums(own_qs, codecs, ranks)

        def decode(summed: list[Tensor]) -> list[Tensor]:
            args_by_item = zip(items, totals, bases, summed, q_sums.contributions(), strict=True)
            return [_low_rank_part(*args, position) for args in args_by_item]

        return _DecodeHandle(q_sums, decode)

    return _TwoStepSum(_ThinSums(ps, codecs, ranks), send_on)


class _ThinSums:
    """All-reduces in flight of the thin matrices (p or q) of several low-rank sums.

    Args:
        xs: the matrices, float32.
        codecs: the codec that compresses each; None sends it in full.
        ranks: the ranks over which they are summed.
    """

    def __init__(self, xs: list[Tensor], codecs: list[Codec | None], ranks: Ranks) -> None:
        self._xs = xs
        self._plain = [i for i, codec in enumerate(codecs) if codec is None]
        # Column after column, so that the numbers of a block are of similar size.
        columns = {i: xs[i].T.reshape(-1) for i, codec in enumerate(codecs) if codec is not None}
        # For this one sum, their unsent rest is the rounding error of the addend.
        self._coders = {i: Coder(None, codecs[i], x.shape) for i, x in columns.items()}
        for i, coder in self._coders.items():
            coder.unsent = torch.zeros_like(columns[i])
        items = [_all_reduce_item(i, x, self._coders[i], ranks) for i, x in columns.items()]
        self._coded = _start_sum(items, ranks) if items else None
        flat = [xs[i].reshape(-1) for i in self._plain]
        self._flat = current().all_reduce_async(torch.cat(flat), ranks) if flat else None

    def wait(self) -> list[Tensor]:
        """Wait for the sums and return them, with the same bits on every rank."""
        sums = dict(zip(self._coders, self._coded.wait() if self._coded else [], strict=True))
        sums = {i: _matrix_of_columns(x, self._xs[i]) for i, x in sums.items()}
        if self._flat is not None:
            parts = self._flat.wait().split([self._xs[i].numel() for i in self._plain])
            sums |= {i: x.view(self._xs[i].shape) for i, x in zip(self._plain, parts, strict=True)}
        return [sums[i] for i in range(len(self._xs))]

    def contributions(self) -> list[Tensor]:
        """Return what this rank has contributed to each sum, after ``wait``: its matrix as decoded.

        It differs from the matrix itself by the rounding of the codec.
        """
        matrices = list(self._xs)
        for i, coder in self._coders.items():
            assert coder.unsent is not None
            matrices[i] = matrices[i] - _matrix_of_columns(coder.unsent, matrices[i])
        return matrices


def _matrix_of_columns(flat: Tensor, like: Tensor) -> Tensor:
    """Return the matrix of the shape of ``like`` whose columns follow one another in ``flat``."""
    return flat.view(like.shape[1], like.shape[0]).T


def _low_rank_codec(item: _Item) -> LowRank:
    assert isinstance(item.coder.reduce, LowRank)
    return item.coder.reduce


def _low_rank_part(
    item: _Item, total: Tensor, p: Tensor, q: Tensor, own_q: Tensor, position: int
) -> Tensor:
    """Return this rank's part of the sum ``p q'``, or all of it for an all-reduce.

    Args:
        item: the tensor that was summed.
        total: this rank's addend plus its unsent rest (what the sums so far lack of its addends).
        p: first thin matrix, the same on all ranks.
        q: second thin matrix, summed over ranks; it becomes the basis of the next sum.
        own_q: what this rank has contributed to q. ``total - p own_q'`` is kept as the new unsent
            rest.
        position: that of this rank among the ranks of the sum.
    """
    item.coder.store_rounding_error(total, (p @ own_q.T).view(total.shape))
    item.coder.update_basis(q)
    dim, sizes = item.collective.dim, item.collective.sizes
    start, size = sum(sizes[:position]), sizes[position]
    if item.collective.kind == "all_reduce":
        start, size = 0, sum(sizes)
    part = part_of_product(p, q, item.whole_shape, dim, start, size)
    return part.to(item.x.dtype, memory_format=torch.contiguous_format)
