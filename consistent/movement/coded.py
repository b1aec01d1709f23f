"""Boxing in fewer bytes: a codec encodes a shard before it is sent, and all ranks decode it.

```
gather     x  -write->  bytes  ==join==>         bytes of all ranks  -read->  B        one message
reduce     g + unsent  -write->  bytes by rank  ==all-to-all==>  -read, sum in order->  S
           unsent = g + unsent - what the bytes say                               stays on this rank
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
from mirrored.comm import Ranks, Waitable, resized
from mirrored.transports.default import current
from mirrored.transports.failures import counts_lacks

from ..boxing.plan import plan
from ..boxing.steps import Move, Step
from ..spec import piece
from .coders import Coder, by_codec
from .low_rank import LowRank, matrix, orthonormal, part_of_product
from .run import begin, ended
from .several import Collective, Route, Started, cut_of, run_several, start_several

Coders = Sequence[Coder | None]


class _Item(NamedTuple):
    """One of several tensors that are sent together by codecs.

    ``position`` is its index among them, ``cut`` says how it is divided among the ranks, ``coder``
    has its codecs, and ``whole`` is the shape of all ranks' parts together.
    """

    position: int
    x: Tensor
    cut: Collective
    coder: Coder
    whole: tuple[int, ...]

    def shapes(self) -> list[list[int]]:
        """Return the shape of each rank's part, in the order of the ranks."""
        return [resized(self.whole, self.cut.dim, size) for size in self.cut.sizes]


_Send = Callable[[list[_Item], Ranks], Waitable]


@counts_lacks
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
    made = _started_gathers(locals_, routes, coders, begun).wait()
    if not begun:
        ended(*routes)
    return made


@counts_lacks
def start_each(locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders) -> Started:
    """Start ``gather_each`` and return without waiting.

    Shards may not be written to until the results are there.
    """
    if not any(coders):
        return start_several(locals_, routes)
    return _started_gathers(locals_, routes, coders, False)


def _started_gathers(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders, begun: bool
) -> Started:
    codecs = [None if coder is None else coder.gather for coder in coders]
    return _started("all_gather", _gather, (locals_, routes, coders, codecs), begun)


@counts_lacks
def start_reduces(locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders) -> Started:
    """Start a reduce-scatter of each shard from its source to its target spec, and do not wait.

    The addends of a shard are compressed if its coder has a codec for sums.
    """
    codecs = [None if coder is None else coder.reduce for coder in coders]
    return _started("reduce_scatter", _reduce, (locals_, routes, coders, codecs), False)


@counts_lacks
def start_sums(addends: Sequence[Tensor], coders: Sequence[Coder], ranks: Ranks) -> Sums:
    """Start the all-reduce of each of ``addends`` over ``ranks``, compressed by its coder.

    Addends are contiguous, and may not be written to before the sums are there. Each coder adds its
    *unsent rest*, the rounding errors of earlier addends, and keeps the new one; that has one dim,
    except for a low-rank codec, where it has the shape of the addend.
    """
    found: dict[bool, list[_Item]] = {}
    for i, (x, coder) in enumerate(zip(addends, coders, strict=True)):
        is_low = isinstance(coder.reduce, LowRank)
        found.setdefault(is_low, []).append(
            _summed_item(i, x if is_low else x.view(-1), coder, ranks)
        )
    turns = [
        (
            [item.position for item in items],
            _reduce_low(items, ranks) if low else _sum(items, ranks),
        )
        for low, items in found.items()
    ]
    return Sums(addends, turns)


def _summed_item(position: int, x: Tensor, coder: Coder, ranks: Ranks) -> _Item:
    """Return the item for an all-reduce of ``x``, whose dim 0 is divided evenly among ``ranks``."""
    sizes = tuple(piece(len(x), len(ranks), k)[1] for k in range(len(ranks)))
    return _Item(position, x, Collective("all_reduce", ranks, 0, sizes), coder, tuple(x.shape))


class Sums:
    """All-reduces in flight that codecs compress, as ``start_sums`` returns them.

    Each takes two messages, and ``turn`` is called between them. First a rank gets the addends of
    its part, and then it sends their sum to all ranks. A low-rank codec sums one thin matrix in
    each.
    """

    def __init__(self, addends: Sequence[Tensor], turns: list[tuple[list[int], _Turn]]) -> None:
        self._shapes = [x.shape for x in addends]
        self._turns = turns

    def turn(self) -> None:
        """Wait for the first messages, sum what they contain, and send the second."""
        for _, each in self._turns:
            each.turn()

    def wait(self) -> list[Tensor]:
        """Wait for the second messages; return the sums, with the same bits on every rank."""
        made: list[Any] = [None] * len(self._shapes)
        for positions, each in self._turns:
            for i, x in zip(positions, each.wait(), strict=True):
                made[i] = x.view(self._shapes[i])
        return made


def _started(kind: str, send: _Send, given: tuple, begun: bool) -> Started:
    """Start a boxing of each shard: by ``send`` where a codec can compress it, else in full.

    Args:
        kind: kind of the collective, "all_gather" or "reduce_scatter".
        send: function that sends several items over the same ranks.
        given: (shards, routes, coders, codecs), each a sequence.
        begun: whether each boxing was begun (``run.begin``) already.
    """
    found: dict[tuple, list[_Item]] = {}
    plain: list[int] = []
    for i, (x, route, coder, codec) in enumerate(zip(*given, strict=True)):
        cut = _coded_cut(x, route, codec, kind)
        if cut is None:
            plain.append(i)
            continue
        x = x if begun else begin(x, *route, moves=_coded_moves(x, route, cut, codec))[0]
        key = (cut.ranks, x.device, isinstance(codec, LowRank))
        found.setdefault(key, []).append(_Item(i, x, cut, coder, _whole(x, cut)))
    waits: list[tuple[list[int], Any]] = []
    if plain:
        xs, routes = ([given[k][i] for i in plain] for k in (0, 1))
        waits.append((plain, _as_it_is(xs, routes, begun)))
    for (ranks, _, low), items in found.items():
        started = (_reduce_low if low else send)(items, ranks)
        waits.append(([item.position for item in items], started))
    return Started([None] * len(given[0]), waits)


def begin_gathers(
    locals_: Sequence[Tensor], routes: Sequence[Route], coders: Coders
) -> list[Tensor]:
    """Begin each boxing, and return the shards to pass to ``gather_each(begun=True)``.

    To begin is to check the boxing and to notify tracers (``run.begin``). A caller that sends
    later, in another thread, does that first in the thread of the program.
    """
    made = []
    for x, route, coder in zip(locals_, routes, coders, strict=True):
        codec = None if coder is None else coder.gather
        cut = _coded_cut(x, route, codec, "all_gather")
        moves = None if cut is None else _coded_moves(x, route, cut, codec)
        made.append(begin(x, *route, moves=moves)[0])
    return made


def _coded_cut(x: Tensor, route: Route, codec: Any, kind: str) -> Collective | None:
    """Return the collective by which ``codec`` can box ``x``, or None if it cannot.

    It cannot without a codec, for a sparse ``x``, or if the boxing is not one collective of
    ``kind``.
    """
    cut = None if codec is None or x.layout is not torch.strided else cut_of(route)
    return cut if cut is not None and cut.kind == kind else None


def _whole(x: Tensor, cut: Collective) -> tuple[int, ...]:
    """Return the shape of all ranks' parts together, given ``x``, one rank's part or the whole."""
    return tuple(resized(x.shape, cut.dim, sum(cut.sizes)))


def _coded_moves(x: Tensor, route: Route, cut: Collective, codec: Any) -> tuple[Step, ...]:
    """Return the one move of a boxing, with the bytes that it sends if ``codec`` is used."""
    (move,) = plan(*route)
    assert isinstance(move, Move)
    sizes = [math.prod(resized(x.shape, cut.dim, size)) for size in cut.sizes]
    return (by_codec(move, codec, sizes, _whole(x, cut)),)


def _as_it_is(xs: list[Tensor], routes: list[Route], begun: bool) -> Started:
    """Start the boxings of shards that no codec compresses."""
    return Started(run_several(xs, routes, None, True), []) if begun else start_several(xs, routes)


class _Read:
    """A message in flight; ``wait`` waits for it and returns what ``read`` decodes from it."""

    def __init__(self, arriving: Waitable, read: Callable[[Any], list[Tensor]]) -> None:
        self._arriving, self._read = arriving, read

    def wait(self) -> list[Tensor]:
        with torch.no_grad():
            return self._read(self._arriving.wait())


class _Turn:
    """The first of two messages in flight, the second of which depends on what arrives.

    ``turn`` waits for the first and calls ``send_on`` with its content, which sends the second;
    ``wait`` waits for the second.
    """

    def __init__(self, arriving: Waitable, send_on: Callable[[Any], Waitable]) -> None:
        self._arriving, self._send_on = arriving, send_on
        self._second: Waitable | None = None

    def turn(self) -> None:
        if self._second is None:
            with torch.no_grad():
                self._second = self._send_on(self._arriving.wait())

    def wait(self) -> list[Tensor]:
        self.turn()
        assert self._second is not None
        return self._second.wait()


# ---- gathers -------------------------------------------------------------------------------------


def _gather(items: list[_Item], ranks: Ranks) -> Waitable:
    """Encode this rank's items and start gathering them over ``ranks``."""
    codecs = [_gather_codec(item) for item in items]
    return _joining(items, codecs, [c.write(i.x) for c, i in zip(codecs, items)], ranks)


def _joining(
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
    arriving = current().start_all_gather_several(messages, [0] * len(items), sizes, ranks)

    def read(joined: list[Tensor]) -> list[Tensor]:
        return [_joined(*each) for each in zip(items, codecs, joined, sizes, strict=True)]

    return _Read(arriving, read)


def _gather_codec(item: _Item) -> Codec:
    assert item.coder.gather is not None
    return item.coder.gather


def _joined(item: _Item, codec: Codec, message: Tensor, sizes: list[int]) -> Tensor:
    """Return the whole tensor of ``item``, decoded from the bytes of all ranks.

    ``message`` is the concatenation of these bytes, and ``sizes`` are their numbers by rank.
    """
    parts = [
        codec.read([part], math.prod(shape), item.x.dtype).view(shape)
        for part, shape in zip(message.split(sizes), item.shapes(), strict=True)
    ]
    return torch.cat(parts, item.cut.dim)


# ---- reduce-scatters -----------------------------------------------------------------------------


def _reduce(items: list[_Item], ranks: Ranks) -> Waitable:
    """Encode this rank's addends and start a reduce-scatter of them; waiting returns its parts."""
    me = ranks.index(current().rank)
    written = [_written(item) for item in items]
    pieces = [torch.cat([parts[k] for parts in written]) for k in range(len(ranks))]
    # All ranks cut an addend in the same way, so each sends this rank as many bytes as it keeps.
    arriving = current().start_all_to_all(pieces, [pieces[me].shape] * len(ranks), ranks)
    sizes = [parts[me].numel() for parts in written]

    def read(arrived: list[Tensor]) -> list[Tensor]:
        of_items = zip(*(message.split(sizes) for message in arrived), strict=True)
        return [_summed(item, me, each) for item, each in zip(items, of_items, strict=True)]

    return _Read(arriving, read)


@torch.no_grad()
def _written(item: _Item) -> list[Tensor]:
    """Encode this rank's addend plus its unsent rest; return the bytes for each rank.

    The unsent rest is the rounding errors of earlier addends. It is replaced by that of this one.
    """
    codec, (dim, sizes) = _reduce_codec(item), (item.cut.dim, item.cut.sizes)
    parts = zip(item.x.split(sizes, dim), item.coder.unsent_parts(sizes, dim), strict=True)
    return [codec.write(part, unsent) for part, unsent in parts]


def _reduce_codec(item: _Item) -> Codec:
    codec = item.coder.reduce
    assert codec is not None and not isinstance(codec, LowRank)
    return codec


def _summed(item: _Item, me: int, messages: Sequence[Tensor]) -> Tensor:
    """Return this rank's part of a sum, decoded and added up from the messages of all ranks.

    ``me`` is the position of this rank.
    """
    shape = item.shapes()[me]
    return _reduce_codec(item).read(messages, math.prod(shape), item.x.dtype).view(shape)


def _sum(items: list[_Item], ranks: Ranks) -> _Turn:
    """Start an all-reduce of the items: the reduce-scatter first, then a gather of its result."""
    me = ranks.index(current().rank)

    def send_on(parts: list[Tensor]) -> Waitable:
        messages = [_written_sum(*each, me) for each in zip(items, parts, strict=True)]
        return _joining(items, [_reduce_codec(item) for item in items], messages, ranks)

    return _Turn(_reduce(items, ranks), send_on)


def _written_sum(item: _Item, part: Tensor, me: int) -> Tensor:
    """Encode ``part``, the part of a sum that this rank has added up, to send it to all ranks.

    The rounding error is added to the coder's unsent rest, and so goes into this rank's next
    addend.
    """
    kept = item.coder.unsent_parts(item.cut.sizes, item.cut.dim)[me]
    if kept is None:
        return _reduce_codec(item).write(part)
    left = torch.zeros_like(part, dtype=kept.dtype)
    message = _reduce_codec(item).write(part, left)
    # In place, since `kept` is a view of the coder's unsent rest.
    kept += left
    return message


# ---- sums of low rank -------------------------------------------------------------------------


@torch.no_grad()
def _reduce_low(items: list[_Item], ranks: Ranks) -> _Turn:
    """Start sums of matrices over ranks, each sent as a product of thin matrices p and q.

    The first message sums p over ranks, the second q; ``low_rank`` has the method (PowerSGD).
    """
    totals = [item.coder.with_unsent(item.x) for item in items]
    ms = [matrix(total) for total in totals]
    ps = [item.coder.on_basis(m) for m, item in zip(ms, items, strict=True)]
    codecs = [_low_rank(item).thin for item in items]
    me = ranks.index(current().rank)

    def send_on(summed: list[Tensor]) -> Waitable:
        # The same on every rank, because the sums have the same bits on every rank.
        common = [orthonormal(p) for p in summed]
        own = [m.T @ p for m, p in zip(ms, common, strict=True)]
        sent = _ThinSums(own, codecs, ranks)

        def read(summed: list[Tensor]) -> list[Tensor]:
            each = zip(items, totals, common, summed, sent.sent(), strict=True)
            return [_of_low_rank(*one, me) for one in each]

        return _Read(sent, read)

    return _Turn(_ThinSums(ps, codecs, ranks), send_on)


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
        items = [_summed_item(i, x, self._coders[i], ranks) for i, x in columns.items()]
        self._coded = _sum(items, ranks) if items else None
        flat = [xs[i].reshape(-1) for i in self._plain]
        self._flat = current().all_reduce_async(torch.cat(flat), ranks) if flat else None

    def wait(self) -> list[Tensor]:
        """Wait for the sums and return them, with the same bits on every rank."""
        made = dict(zip(self._coders, self._coded.wait() if self._coded else [], strict=True))
        made = {i: _columns(x, self._xs[i]) for i, x in made.items()}
        if self._flat is not None:
            parts = self._flat.wait().split([self._xs[i].numel() for i in self._plain])
            made |= {i: x.view(self._xs[i].shape) for i, x in zip(self._plain, parts, strict=True)}
        return [made[i] for i in range(len(self._xs))]

    def sent(self) -> list[Tensor]:
        """Return what this rank has contributed to each sum, after ``wait``: its matrix as decoded.

        It differs from the matrix itself by the rounding of the codec.
        """
        made = list(self._xs)
        for i, coder in self._coders.items():
            assert coder.unsent is not None
            made[i] = made[i] - _columns(coder.unsent, made[i])
        return made


def _columns(flat: Tensor, like: Tensor) -> Tensor:
    """Return the matrix of the shape of ``like`` whose columns follow one another in ``flat``."""
    return flat.view(like.shape[1], like.shape[0]).T


def _low_rank(item: _Item) -> LowRank:
    assert isinstance(item.coder.reduce, LowRank)
    return item.coder.reduce


def _of_low_rank(item: _Item, total: Tensor, p: Tensor, q: Tensor, mine: Tensor, me: int) -> Tensor:
    """Return this rank's part of the sum ``p q'``, or all of it for an all-reduce.

    Args:
        item: the tensor that was summed.
        total: this rank's addend plus its unsent rest (what the sums so far lack of its addends).
        p: first thin matrix, the same on all ranks.
        q: second thin matrix, summed over ranks; it becomes the basis of the next sum.
        mine: what this rank has contributed to q. ``total - p mine'`` is kept as the new unsent
            rest.
        me: position of this rank.
    """
    item.coder.keep(total, (p @ mine.T).view(total.shape))
    item.coder.turn(q)
    dim, sizes = item.cut.dim, item.cut.sizes
    start, size = sum(sizes[:me]), sizes[me]
    if item.cut.kind == "all_reduce":
        start, size = 0, sum(sizes)
    part = part_of_product(p, q, item.whole, dim, start, size)
    return part.to(item.x.dtype, memory_format=torch.contiguous_format)
