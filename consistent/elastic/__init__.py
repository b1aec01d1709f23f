"""Elastic training: it continues when ranks are lost, and when new ranks come.

```
worlds   calls a training function again each time that the set of ranks, the world, changes
member   the connection of this process to the launcher, by which it enters a world
job      the object that the function gets: a placement, the last step's state, the end of a step
recovery measures the parts of a recovery
slow     finds ranks that need longer than others
copies   what a rank keeps of the last step, and when it is valid
fetch    sends these copies to the ranks that need them
launch   the launcher: python -m consistent run
```
"""

from .job import Job
from .worlds import run

__all__ = ["Job", "run"]
