"""Division of a foreach op (on lists of tensors) among the ranks that one process simulates.

A step of an optimizer may be one call for the parameters of all stages:

```
_fused_adamw_([w0, w1], [g0, g1])     w0, g0 on rank 0    --->  rank 0: _fused_adamw_([w0], [g0])
                                      w1, g1 on rank 1          rank 1: _fused_adamw_([w1], [g1])
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Ops that compute each position of their lists (the i-th tensors of all lists) on its own.
_LIST_OP_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")


class RankShare:
    """What one rank computes of a foreach op, such as ``torch._foreach_add``.

    ``positions`` are the indices in the lists that the rank computes; None stands for all.
    """

    def __init__(self, rank: int, positions: Sequence[int] | None = None) -> None:
        self.rank, self._positions = rank, positions

    def select(self, values: Any) -> Any:
        """Return arguments or results of the op, with only this rank's positions of each list."""
        if self._positions is None:
            return values
        if _is_list(values):
            return [values[i] for i in self._positions]
        if isinstance(values, tuple):
            return tuple(self.select(x) if _is_list(x) else x for x in values)
        return values


def split_by_rank(
    func: torch._ops.OpOverload, args: tuple, rank_of: Callable[[Sequence[Tensor]], int]
) -> list[RankShare] | None:
    """Return what each rank computes of a foreach op; None for other ops.

    ``rank_of`` returns the rank that holds the tensors at one position of the lists.
    """
    if not func._schema.name.partition("::")[2].startswith(_LIST_OP_PREFIXES):
        return None
    lists = [x for x in args if _is_list(x)]
    positions_of: dict[int, list[int]] = {}
    for i, at in enumerate(zip(*lists, strict=True)):
        positions_of.setdefault(rank_of(at), []).append(i)
    return [RankShare(rank, at) for rank, at in positions_of.items()]


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(t, Tensor) for t in x)
