"""Islands: groups of ranks in one job that train independently and seldom synchronize.

This is known as local SGD or DiLoCo.

```
join     splits the launched ranks into islands; each is a world of its own
outer    every N steps, takes one step of an outer optimizer on the difference between islands
```

Source: Stich, Local SGD Converges Fast and Communicates Little (2019); Douillard et al., DiLoCo:
Distributed Low-Communication Training of Language Models (2023), for the outer optimizer, and
Streaming DiLoCo with Overlapping Communication (2025), for synchronizing the parameters in parts
and for sending them in a lower-precision dtype.
"""

from .island import Islands, join
from .outer import Outer

__all__ = ["Islands", "Outer", "join"]
