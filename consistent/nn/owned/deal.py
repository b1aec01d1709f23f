"""Which rank owns which matrix: arithmetic on shapes alone, so that all ranks deal alike.

```
12 blocks on 2 ranks        rank 0                       rank 1
6144 x 1536  fc             blocks 0, 2, 4, ...          blocks 1, 3, 5, ...
1536 x 1536  proj           blocks 0, 2, 4, ...          blocks 1, 3, 5, ...
```

The most costly goes first, to the rank with the least cost so far. Equal ones follow each other, so
ranks get equal numbers of each shape where these divide; then the deal is even by any measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]
Load = tuple[float, int]  # the cost of what a rank owns, and how many these are


def flops_of(shape: Shape) -> float:
    """The work of stepping a parameter: for a matrix of m rows and n >= m columns m * m * (2 n +
    m), as in an iteration of Newton and Schulz. What has more dims counts as its rows by all else,
    and a vector as its elements."""
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        return float(size)
    short, long = sorted((shape[0], size // shape[0]))
    return float(short * short * (2 * long + short))


def deal(
    shapes: Sequence[Shape],
    costs: Sequence[float],
    ranks: Sequence[int],
    loads: dict[int, Load],
) -> list[int]:
    """The owner of each parameter.

    Args:
        shapes, costs: of the parameters.
        ranks: those among which they are dealt out.
        loads: what ranks own already; what they get is added.
    """
    owners = [0] * len(shapes)
    place = {rank: k for k, rank in enumerate(ranks)}
    order = sorted(range(len(shapes)), key=lambda i: (-costs[i], sorted(shapes[i]), i))
    for i in order:
        owners[i] = min(ranks, key=lambda rank: (*loads.get(rank, (0.0, 0)), place[rank]))
        cost, count = loads.get(owners[i], (0.0, 0))
        loads[owners[i]] = cost + costs[i], count + 1
    return owners
