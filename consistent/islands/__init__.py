"""islands: parts of a job that train on their own and seldom meet (local SGD, DiLoCo).

```
join     cuts the launched ranks into islands; each is a world of its own
outer    after each so many steps, one step of an outer optimizer on what the islands differ by
```

Source: Stich, Local SGD Converges Fast and Communicates Little (2019); Douillard et al., DiLoCo:
Distributed Low-Communication Training of Language Models (2023), for the outer optimizer, and
Streaming DiLoCo with Overlapping Communication (2025), for parts and shorter numbers.
"""

from .island import Islands, join
from .outer import Outer

__all__ = ["Islands", "Outer", "join"]
