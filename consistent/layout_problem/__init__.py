"""The layout problem of a recorded step: which layouts each op may take, what they cost, and the
solver that chooses one for each.

```
ops and values of a step, without layouts            graph/global_ops
  a node for each value given and each op            problem, build
  its options: layouts by rules, with their costs    signatures, costs
  one option for each node, the least seconds        solve
```

The search for a model's plan (``nn/planners/layout_search``) and the search for a compiled step's
layouts (``compiled/layout_search``) build their problems with it.
"""
