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

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ...overlap.chunked_matmul import MAX_CHUNKS, Boxing, chunk_count
from ...overlap.symmetric_matmul import fused_group_and_dim
from ..fused.calls import MultipliedSum, MultipliedWhole, Summed
from ..fused.worth import is_fused_sum_faster
from ..opaque import MESSAGE, OpaqueCall
from ..options import CompileOptions
from .epilogue_fusion import EXTRA_INPUTS, EpilogueMatch, match_epilogue, move_before
from .matmul_fusion import Product, match_product
from .peak import MemoryUse, remove_dead
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
        specs: specs before and after the boxing of a matmul; None for a sum with ops after it.
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
_PerformFusion = Callable[[int], None]


def fuse(trace: Trace, options: CompileOptions) -> None:
    """Perform the fusions that all ranks of a message can perform and that are faster.

    With ``fuse=True``, those that are not faster are performed too. This is a collective of the
    world.
    """
    if not options.fuse:
        return
    remove_dead(trace)
    own_fusions = _possible_fusions(trace)
    fusions_by_rank = [set(rank_fusions) for rank_fusions in gather_from_ranks(own_fusions)]
    common_fusions = [f for f in own_fusions if all(f in fusions_by_rank[rank] for rank in f.ranks)]
    chosen = {f: chunks for f in common_fusions if (chunks := _fusion_chunks(f, options))}
    count = _perform_fusions(trace, chosen)
    if count:
        trace.notes.append(f"fuse: {count} messages are one call with the ops beside them")


def _fusion_chunks(fusion: Fusion, options: CompileOptions) -> int:
    """Return the number of chunks in which to run ``fusion``; 0 if it is not worth it.

    A fusion of a sum with ops after it has one chunk. The result is the same on all ranks of the
    message.
    """
    always = options.fuse is True
    if fusion.specs is not None:
        if always:
            return MAX_CHUNKS
        count = chunk_count(*fusion.specs)
        return count if count > 1 or fused_group_and_dim(*fusion.specs) else 0
    if always:
        return 1
    assert fusion.dtype is not None
    return int(
        is_fused_sum_faster(
            fusion.kind, fusion.ops, fusion.nbytes, fusion.dtype, len(fusion.ranks), fusion.device,
            one_by_one=options.backend == "ops",
            shared=fusion.device == "cuda"
            and current().shares(fusion.ranks, "cuda", fusion.nbytes),
        )
    )  # fmt: skip


def _possible_fusions(trace: Trace) -> list[Fusion]:
    """Return the fusions that are possible in this rank's graph, in the order of messages."""
    return [f for pair in _numbered_messages(trace) for f, _ in _fusions_of_message(trace, *pair)]


def _perform_fusions(trace: Trace, chosen: dict[Fusion, int]) -> int:
    """Perform the ``chosen`` fusions, and return how many were performed.

    ``chosen`` maps a fusion to the number of chunks in which its matmul runs.
    """
    count = 0
    for numbered_message in _numbered_messages(trace):
        for fusion, run in _fusions_of_message(trace, *numbered_message):
            if fusion in chosen:
                run(chosen[fusion])
                count += 1
                break  # the message is gone, and later matches on it are no longer valid
    return count


def _numbered_messages(trace: Trace) -> list[tuple[Node, int]]:
    """Return each message with its number among the messages of the same ranks.

    A message has the same number on all its ranks, so they can name it to each other.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for message in trace.messages():
        ranks = trace.call(message).ranks
        numbered.append((message, counts[ranks]))
        counts[ranks] += 1
    return numbered


def _fusions_of_message(
    trace: Trace, message: Node, number: int
) -> Iterator[tuple[Fusion, _PerformFusion]]:
    """Yield the fusions that are possible for ``message``, each with the function that performs it.

    ``number`` is the position of the message among the messages of its ranks
    (``_numbered_messages``).
    """
    call = trace.call(message)
    if not call.outs or len(trace.inputs(message)) != 1:
        return
    written, device = MemoryUse.written_memories(trace), call.outs[0][2].type
    product = match_product(trace, message, written)
    if product is not None:
        specs = product.src, product.dst
        fusion = Fusion(call.ranks, number, product.name, call.kind, device, specs=specs)
        yield fusion, lambda chunks: _fuse_product(trace, message, product, chunks)
    matched = match_epilogue(trace, message, written) if call.is_sum else None
    if matched is not None:
        (x,) = trace.inputs(message)
        name = ", ".join((call.kind, *matched.names))
        dtype = x.meta["dtype"]
        nbytes = prod(x.meta["shape"]) * dtype.itemsize
        fusion = Fusion(call.ranks, number, name, call.kind, device, nbytes, dtype, matched.names)
        yield fusion, lambda _: _fuse_epilogue(trace, message, matched, name)


def _fuse_epilogue(trace: Trace, message: Node, matched: EpilogueMatch, name: str) -> None:
    call = trace.call(message)
    arguments = call.run.arguments  # type: ignore[attr-defined]
    (x,) = trace.inputs(message)
    is_scattered = call.kind == "reduce_scatter"
    run = Summed(
        call.ranks,
        arguments["dim"] % len(x.meta["shape"]) if is_scattered else 0,
        tuple(arguments["sizes"]) if is_scattered else None,
        matched.epilogue,
        tuple(key in matched.extra_inputs for key in EXTRA_INPUTS),
        matched.returns_total,
        matched.dtype,
    )
    extra = [matched.extra_inputs[key] for key in EXTRA_INPUTS if key in matched.extra_inputs]
    results = [matched.last_node, matched.total] if matched.returns_total else [matched.last_node]
    _replace_by_fused_call(
        trace,
        message,
        replace(call, run=run, kind=name),
        [x, *extra],
        results,
        matched.nodes,
    )


def _fuse_product(trace: Trace, message: Node, product: Product, chunks: int) -> None:
    boxing = Boxing(product.src, product.dst, chunks)
    (item,) = message.users
    if product.is_first:
        run: Any = MultipliedSum(boxing, product.lead)
        results = [item]
    else:
        run = MultipliedWhole(boxing)
        results = [product.node, item]
    call = replace(
        trace.call(message), run=run, kind=product.name, gathered=(), own_part=None, computes=True
    )
    _replace_by_fused_call(trace, message, call, product.operands, results, product.nodes)


def _replace_by_fused_call(
    trace: Trace,
    message: Node,
    call: OpaqueCall,
    inputs: list[Node],
    results: list[Node],
    removed: set[Node],
) -> None:
    """Put the fused ``call`` into the graph in place of ``message`` and the nodes ``removed``.

    ``inputs`` are the nodes of its inputs; its results replace the nodes ``results``, in order.
    """
    (item,) = message.users
    outs = tuple((x.meta["shape"], x.meta["dtype"], call.outs[0][2]) for x in results)
    call = replace(call, text=f"{call.kind}: {call.run!r}", outs=outs)
    trace.calls[call.number] = call
    for x in inputs:
        move_before(x, message)
    with trace.graph.inserting_before(message):
        fused = trace.graph.call_function(MESSAGE, (list(inputs), call.number))
        fused.meta.update(message.meta, text=call.text)
        for i, x in enumerate(results):
            result = trace.graph.call_function(item.target, (fused, i))  # type: ignore[arg-type]
            result.meta.update(x.meta)
            trace.replace(x, result)
    # Last first, because a node can be erased only after the nodes that read it.
    for node in sorted({*removed, item, message}, reverse=True):
        trace.graph.erase_node(node)
