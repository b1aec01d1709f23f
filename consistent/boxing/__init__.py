"""Boxing as arithmetic: from one spec of a tensor to another, without data.

Read `steps.py` (the moves on one axis, as data), `cost.py` (their bytes and seconds), `plan.py`
(the cheapest list of moves), `exchange.py` (who sends what between placements) and `chunks.py`
(a boxing cut into chunks of rows). `movement/` does what is planned here.
"""
