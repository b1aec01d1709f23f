"""Joint choice of the layouts of a whole step, by integer programming.

```
step --record--> program: ops, values, calls of modules         record, program
     --options-> nodes and edges with the cost of each choice    options
     --solve---> one choice for each node, the least seconds     solve (blocks: equal layers)
     --emit----> a Plan: parameters, boxing at module calls      emit
     --follow--> estimate of a run under that plan, op by op     follow
```

At run time each op chooses its layouts from those of its operands, so a plan can only fix the
layouts of parameters, and the boxing of values at calls of modules. The solution can therefore
differ from the run; ``follow`` estimates the run under a plan with the cost formulas by which ops
choose. Of several plans, the one with the fastest estimated run is taken.
"""

from .search import best_plan

__all__ = ["best_plan"]
