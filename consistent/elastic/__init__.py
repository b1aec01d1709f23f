"""Elastic training: it continues when ranks are lost, and when new ranks come.

```
worlds   calls a training function again each time that the set of ranks, the world, changes
member   the connection of this process to the launcher, by which it enters a world
job      the object that the function gets: a placement, the last step's state, the end of a step
recovery measures how long each part of a recovery takes
slow     finds ranks that need longer than others
copies   the copies of the training state that a rank keeps, and when they are valid
fetch    sends these copies to the ranks that need them
launch   the launcher: python -m consistent run
```
"""

from .job import Job
from .worlds import run

__all__ = ["Job", "run"]
