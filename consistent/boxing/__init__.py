"""Boxing: from one spec of a tensor to another.

Read `steps.py` (the moves on one axis, as data), `cost.py` (their bytes and seconds), `plan.py`
(the cheapest list of moves), `choose.py` (which specs to box an op's inputs into), `run.py` (moves
-> collectives on the shard), `differentiable.py` (forward and backward as mirror images) and
`check.py` (ranks compare notes). Modules are imported by name, so that the planner never pulls in
communication.
"""

__all__: list[str] = []
