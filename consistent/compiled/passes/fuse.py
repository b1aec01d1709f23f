"""Pass that fuses a message and the ops next to it into one call of a native kernel (option
``fuse``).

```
%4 = mm(%0, %1)                         %4 = mm(%0, %1)
%5 = message reduce_scatter(%4)   -->   %7 = message reduce_scatter, bias, gelu(%4, %2)
%6 = add(%5, %2)
%7 = gelu(%6)
%4 = mm(%0, %1)                   -->   %5 = message mm, all_reduce(%0, %1)
%5 = message all_reduce(%4)
%3 = message all_gather(%0)       -->   %3, %4 = message all_gather, mm(%0, %1)
%4 = mm(%3, %1)
```

A fusion changes how a message is sent, so either all ranks of the message do it, or none:

```
each rank     lists the fusions that are possible in its graph
all ranks     keep those possible on all ranks of the message, and faster by the cost model
each rank     performs these
```

A fusion that needs nodes which an earlier fusion has replaced is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from mirrored.every_rank import gathered
from mirrored.transports.default import current

from ...overlap.chunked_matmul import MOST_CHUNKS, Boxing, chunk_count
from ...overlap.symmetric_matmul import fused_over
from ..fused.calls import MultipliedSum, MultipliedWhole, Summed
from ..fused.worth import sum_wins
from ..opaque import MESSAGE, OpaqueCall
from ..options import CompileOptions
from .epilogue_fusion import BESIDE, EpilogueMatch, match_epilogue, put_before
from .matmul_fusion import Product, match_product
from .peak import Count, remove_dead
from .trace import Trace


class Fusion(NamedTuple):
    """A possible fusion of a message with ops next to it, described equally on all its ranks.

    Ranks gather these to find the fusions that are possible on all of them.

    Args:
        ranks, number: ranks of the message, and its number among the messages of these ranks.
        name: names of the message and the ops, in order.
        kind: kind of the message, such as "all_reduce".
        device: type of the device.
        nbytes, dtype: size and dtype of what a rank contributes to a sum.
        ops: names of the ops that the kernel does after the sum.
        specs: specs before and after the boxing of a matrix product; None for a sum with ops after
            it.
    """

    ranks: tuple[int, ...]
    number: int
    name: str
    kind: str
    device: str
    nbytes: int = 0
    dtype: torch.dtype | None = None
    ops: tuple[str, ...] = ()
    specs: tuple[Any, Any] | None = None


# Performs a fusion; called with the number of chunks.
_Run = Callable[[int], None]


def fuse(trace: Trace, options: CompileOptions) -> None:
    """Perform the fusions that all ranks of a message can perform and that are faster.

    With ``fuse=True``, those that are not faster are performed too. This is a collective of the
    world.
    """
    if not options.fuse:
        return
    remove_dead(trace)
    mine = _fusions(trace)
    others = [set(each) for each in gathered(mine)]
    both = [f for f in mine if all(f in others[rank] for rank in f.ranks)]
    chosen = {f: chunks for f in both if (chunks := _chunks(f, options))}
    done = _fuse(trace, chosen)
    if done:
        trace.notes.append(f"fuse: {done} messages are one call with the ops beside them")


def _chunks(found: Fusion, options: CompileOptions) -> int:
    """Return the number of chunks in which to run the fusion ``found``; 0 if it is not worth it.

    A fusion of a sum with ops after it has one chunk. The result is the same on all ranks of the
    message.
    """
    always = options.fuse is True
    if found.specs is not None:
        if always:
            return MOST_CHUNKS
        count = chunk_count(*found.specs)
        return count if count > 1 or fused_over(*found.specs) else 0
    if always:
        return 1
    assert found.dtype is not None
    return int(
        sum_wins(
            found.kind, found.ops, found.nbytes, found.dtype, len(found.ranks), found.device,
            one_by_one=options.backend == "ops",
            shared=found.device == "cuda"
            and current().shares(found.ranks, "cuda", found.nbytes),
        )
    )  # fmt: skip


def _fusions(trace: Trace) -> list[Fusion]:
    """Return the fusions that are possible in this rank's graph, in the order of messages."""
    return [f for at in _numbered(trace) for f, _ in _beside(trace, *at)]


def _fuse(trace: Trace, chosen: dict[Fusion, int]) -> int:
    """Perform the ``chosen`` fusions, and return how many were performed.

    ``chosen`` maps a fusion to the number of chunks in which its product runs.
    """
    done = 0
    for at in _numbered(trace):
        for fusion, run in _beside(trace, *at):
            if fusion in chosen:
                run(chosen[fusion])
                done += 1
                break  # the message is gone, and later matches on it are no longer valid
    return done


def _numbered(trace: Trace) -> list[tuple[Node, int]]:
    """Return each message with its number among the messages of the same ranks.

    A message has the same number on all its ranks, so they can name it to each other.
    """
    met: Counter[tuple[int, ...]] = Counter()
    found = []
    for message in trace.messages():
        ranks = trace.call(message).ranks
        found.append((message, met[ranks]))
        met[ranks] += 1
    return found


def _beside(trace: Trace, message: Node, number: int) -> Iterator[tuple[Fusion, _Run]]:
    """Yield the fusions that are possible for ``message``, each with the function that performs it.

    ``number`` is the position of the message among the messages of its ranks (``_numbered``).
    """
    call = trace.call(message)
    if not call.outs or len(trace.given(message)) != 1:
        return
    written, device = Count.written(trace), call.outs[0][2].type
    product = match_product(trace, message, written)
    if product is not None:
        specs = product.src, product.dst
        known = Fusion(call.ranks, number, product.name, call.kind, device, specs=specs)
        yield known, lambda chunks: _fuse_product(trace, message, product, chunks)
    matched = match_epilogue(trace, message, written) if call.is_sum else None
    if matched is not None:
        (x,) = trace.given(message)
        name = ", ".join((call.kind, *matched.names))
        dtype = x.meta["dtype"]
        nbytes = prod(x.meta["shape"]) * dtype.itemsize
        known = Fusion(call.ranks, number, name, call.kind, device, nbytes, dtype, matched.names)
        yield known, lambda _: _fuse_epilogue(trace, message, matched, name)


def _fuse_epilogue(trace: Trace, message: Node, matched: EpilogueMatch, name: str) -> None:
    call = trace.call(message)
    given = call.run.arguments  # type: ignore[attr-defined]
    (x,) = trace.given(message)
    cuts = call.kind == "reduce_scatter"
    run = Summed(
        call.ranks,
        given["dim"] % len(x.meta["shape"]) if cuts else 0,
        tuple(given["sizes"]) if cuts else None,
        matched.epilogue,
        tuple(key in matched.beside for key in BESIDE),
        matched.keeps,
        matched.dtype,
    )
    beside = [matched.beside[key] for key in BESIDE if key in matched.beside]
    made = [matched.at, matched.total] if matched.keeps else [matched.at]
    _put(trace, message, replace(call, run=run, kind=name), [x, *beside], made, matched.inside)


def _fuse_product(trace: Trace, message: Node, product: Product, chunks: int) -> None:
    boxing = Boxing(product.src, product.dst, chunks)
    (item,) = message.users
    if product.is_first:
        run: Any = MultipliedSum(boxing, product.lead)
        made = [item]
    else:
        run = MultipliedWhole(boxing)
        made = [product.node, item]
    call = replace(
        trace.call(message), run=run, kind=product.name, gathered=(), own=None, computes=True
    )
    _put(trace, message, call, product.given, made, product.inside)


def _put(
    trace: Trace,
    message: Node,
    call: OpaqueCall,
    given: list[Node],
    made: list[Node],
    gone: set[Node],
) -> None:
    """Put the fused ``call`` into the graph in place of ``message`` and the nodes ``gone``.

    ``given`` are the nodes of its inputs; its results replace the nodes ``made``, in order.
    """
    (item,) = message.users
    outs = tuple((x.meta["shape"], x.meta["dtype"], call.outs[0][2]) for x in made)
    call = replace(call, text=f"{call.kind}: {call.run!r}", outs=outs)
    trace.calls[call.number] = call
    for x in given:
        put_before(x, message)
    with trace.graph.inserting_before(message):
        fused = trace.graph.call_function(MESSAGE, (list(given), call.number))
        fused.meta.update(message.meta, text=call.text)
        for i, x in enumerate(made):
            result = trace.graph.call_function(item.target, (fused, i))  # type: ignore[arg-type]
            result.meta.update(x.meta)
            trace.replace(x, result)
    # Last first, because a node can be erased only after the nodes that read it.
    for node in sorted({*gone, item, message}, reverse=True):
        trace.graph.erase_node(node)
