"""Assign matrices to ranks, from their shapes alone, so that all ranks agree.

```
12 blocks on 2 ranks        rank 0                       rank 1
6144 x 1536  fc             blocks 0, 2, 4, ...          blocks 1, 3, 5, ...
1536 x 1536  proj           blocks 0, 2, 4, ...          blocks 1, 3, 5, ...
```

The most expensive matrix is assigned first, to the rank with the least cost so far. Equal shapes
follow one another, so each rank gets the same number of each shape if the numbers divide; the
assignment is then even for any cost function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]
Load = tuple[float, int]  # the cost and the number of the parameters that a rank owns


def flops_of(shape: Shape) -> float:
    """Return the work of stepping a parameter of ``shape``, the default cost for balancing ranks.

    For a matrix of m rows and n >= m columns it is m * m * (2 n + m), as in a Newton-Schulz
    iteration. A tensor with more dims counts as a matrix of its first dim by all others, and a
    vector as its number of elements.
    """
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        return float(size)
    short, long = sorted((shape[0], size // shape[0]))
    return float(short * short * (2 * long + short))


def assign_owners(
    shapes: Sequence[Shape],
    costs: Sequence[float],
    ranks: Sequence[int],
    loads: dict[int, Load],
) -> list[int]:
    """Return the owner of each parameter: the one rank that steps it as a whole matrix.

    The most expensive parameter is assigned first, to the rank with the least cost so far: costs
    9, 5, 4 on ranks 0 and 1 -> owners 0, 1, 1.

    Args:
        shapes, costs: the shape and the cost of each parameter.
        ranks: the ranks that may become owners.
        loads: rank -> (cost, number) of the parameters that it owns from earlier calls; the new
            ones are added in place.
    """
    owners = [0] * len(shapes)
    place = {rank: k for k, rank in enumerate(ranks)}
    # By cost, and equal shapes next to each other; the index makes the order unique.
    order = sorted(range(len(shapes)), key=lambda i: (-costs[i], sorted(shapes[i]), i))
    for i in order:
        owners[i] = min(ranks, key=lambda rank: (*loads.get(rank, (0.0, 0)), place[rank]))
        cost, count = loads.get(owners[i], (0.0, 0))
        loads[owners[i]] = cost + costs[i], count + 1
    return owners
