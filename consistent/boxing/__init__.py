"""Plans for boxing: moving (redistributing) a tensor from one spec to another.

A plan is made by arithmetic on specs alone, without data. Read `steps.py` (the moves on one axis,
as data), `cost.py` (the bytes and seconds of a move), `plan.py` (the cheapest list of moves),
`exchange.py` (which rank sends what between placements) and `chunks.py` (a boxing cut into chunks
of rows). `movement/` carries out the plans made here.
"""
