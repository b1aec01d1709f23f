"""Attention of documents packed one after the other in dim 0 (``torch.nn.attention.varlen``).

```
tokens          a a a b b b b c c     cu_seq = (0, 3, 7, 9)
rank 0, 1       a a a b b | b b c c   rank 1 is sent two keys of b, and rank 0 none if it is causal
```
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ....spec import Split
from ...refused import require
from ...registry import Shards, form
from ...whole_numbers import read_ints
from .ring_attention import Round, attend_round, empty_output, group_of, scale_of
from .sight import Document, Sight


@form("packed_attention")
def packed_attention(shard: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``torch.nn.attention.varlen`` attention on this rank's tokens.

    Returns (result, log-sum-exp of each row, a placeholder for the RNG state).
    """
    query, key, value = (shard.get(name) for name in ("query", "key", "value"))
    device = query.device
    random = torch.zeros(2, dtype=torch.uint64, device=device)
    if shard.coordinate is None:
        logs = torch.empty(shard.out_shape(1), device=device)
        return empty_output(shard, [query, key, value]), logs, random
    starts = [x for x in (shard.get("cu_seq_q"), shard.get("cu_seq_k")) if x is not None]
    if query.is_cuda and not _rows_are_split(shard):
        return shard.run(*shard.args, **shard.kwargs)
    left, right = shard.get("window_size") or (-1, -1)
    tokens = shard.specs[0].shape[0], shard.specs[1].shape[0]
    reads = Reads(None if left < 0 else left, _right_window(shard, right), tokens)
    for x in starts:
        _check_starts(x, tokens[0] if x is starts[0] else tokens[1])
    round_ = Round(group_of(shard, 0), scale_of(shard, query), reads)
    # varlen operands are [tokens, heads, width]; the ring takes [batch, heads, tokens, width].
    operands = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
    out, total = attend_round(round_, operands[0], operands[1], operands[2], starts)
    return out.squeeze(0).transpose(0, 1), total.squeeze(0).to(torch.float32), random


def _right_window(shard: Shards, right: int) -> int | None:
    """Return how many keys after its position a row may attend to; None is no limit."""
    causal = bool(shard.get("is_causal", False))
    return 0 if causal else None if right < 0 else right


def _rows_are_split(shard: Shards) -> bool:
    return any(isinstance(e, Split) and e.dim == 0 for e in shard.specs[0].sbp)


def _check_starts(starts: Tensor, tokens: int) -> None:
    """Raise on all ranks unless ``starts``, where documents start, ascend from 0 or more.

    The last, which is the end of the last document, must not be above ``tokens``, the number of
    tokens.
    """
    is_ascending = (starts[1:] >= starts[:-1]).all()
    is_in_range = (starts[:1] >= 0).all() & (starts[-1:] <= tokens).all()
    require(
        is_ascending & is_in_range,
        "varlen_attn: cu_seq must rise from 0 or more to at most the number of tokens, "
        f"{tokens}, and it does not. Give cumulative lengths of the documents.",
    )


@dataclass(frozen=True)
class Reads:
    """Window of keys that rows of packed documents attend to; ``read`` adds where documents start.

    A row attends to ``left`` keys before its position and ``right`` keys after it; None is no
    limit. Positions are counted from the end of a document, which matters where it has more keys
    than rows. ``tokens`` are the numbers of rows and of keys.
    """

    left: int | None
    right: int | None
    tokens: tuple[int, int]

    def read(self, *starts: Tensor) -> Sight:
        """Return the documents, from the values of ``starts``.

        ``starts`` are the starts of their rows and of their keys (``cu_seq_q``, ``cu_seq_k``), or
        one tensor for both.
        """
        rows = _starts_as_ints(starts[0], self.tokens[0])
        keys = _starts_as_ints(starts[-1], self.tokens[1])
        documents = [
            self._document(row, key)
            for row, key in zip(pairwise(rows), pairwise(keys), strict=True)
            if row[0] < row[1] and key[0] < key[1]
        ]
        return tuple(documents)

    def _document(self, rows: tuple[int, int], keys: tuple[int, int]) -> Document:
        ahead = keys[1] - rows[1]  # aligns the last row with the last key
        low = None if self.left is None else ahead - self.left
        high = None if self.right is None else ahead + self.right
        return Document(rows, keys, low, high)


def _starts_as_ints(starts: Tensor, tokens: int) -> list[int]:
    """Return the starts of the documents as ints.

    In a simulation, where values are not known, all documents are taken to have the same length.
    """
    count = len(starts) - 1
    return read_ints(starts, lambda: [tokens * i // max(1, count) for i in range(count + 1)])
