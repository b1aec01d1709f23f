"""elastic: a training that goes on when ranks are lost, and when others come.

```
worlds   calls a training function in one world of ranks after another (member: how it gets there)
job      what the function is given: a placement, the state of the last step, the end of a step
slow     which ranks need longer than others
copies   what a rank keeps of the last step, and when it is valid (fetch: how others get it)
launch   python -m consistent run
```
"""

from .job import Job
from .worlds import run

__all__ = ["Job", "run"]
