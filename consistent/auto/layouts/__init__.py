"""The layouts of a whole step, chosen at once by integer programming.

```
step --record--> program: ops, values, calls of modules         record, program
     --options-> nodes and edges, what each choice costs         options, costs, figures
     --solve---> one choice for each node, the least seconds     solve (blocks: what repeats is one)
     --emit----> a Plan: tensors and borders of modules          emit
     --follow--> what a run under that plan does, op by op       follow
```

A run chooses op by op, so a plan can only say how parameters lie and what is boxed where modules
are called. What a run makes of the plan is followed by the same arithmetic that the run uses, and
of several plans the one is taken whose run is estimated to be fastest.
"""

from .search import best_plan

__all__ = ["best_plan"]
