"""Choice of the layouts of a whole step at once, by integer programming.

```
step --record--> program: ops, values, calls of modules         record, program
     --options-> nodes and edges, what each choice costs         options, costs, figures
     --solve---> one choice for each node, the least seconds     solve (blocks: what repeats is one)
     --emit----> a Plan: tensors and borders of modules          emit
     --follow--> what a run under that plan does, op by op       follow
```

A run chooses layouts op by op, so a plan can only fix the layouts of parameters and the boxing
where modules are called. ``follow`` estimates the run under a plan by the same arithmetic that the
run uses. Of several plans, the one with the fastest estimated run is taken.
"""

from .search import best_plan

__all__ = ["best_plan"]
