"""Search for the parallel strategy that trains a model fastest on a machine, within its memory.

```
units       the parts of the model, in order; equal ones are of one kind         (units.py)
costs       seconds and bytes of each kind, simulated once for each tensor size  (costs.py)
stages      which units each stage has                                (pipeline/balance.py)
estimates   a step of each choice, put together from the costs                   (estimates.py)
tried       the best of them simulated as whole steps                            (search.py)
strategy    what was found, as a file, and applied to a model                    (strategy.py)
```
"""

from .search import Found, Tried, search
from .strategy import Strategy

__all__ = ["Found", "Strategy", "Tried", "search"]
