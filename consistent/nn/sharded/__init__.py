"""Sharded parameters (ZeRO): they lie split, and are whole only where forward, backward or an
optimizer needs it. What happens to one of them:

```
                gather                            release
  lies as S  -------------->  whole, in a run  -------------->  lies as S, and autograd has saved
     ^   ^   (prefetched)     of its module                     how its views lie in the whole
     |   |                                                             |
     |   |  the last view is taken                             take    |  backward needs a view:
     |   +---------------------------------  whole again  <------------+  gather once more
     |                                            |           (prefetched)
     |   reduce                                   v
     |   the gradient lies as S  <-------  gradient of the whole, P
     |
     |   enter the step         leave the step
     +-----------------> laid out as the step is -------> lies as before
                         (or its float32 copy)            (others' parts are gathered)
```

Where each is:

* ``gathered.py``: which parameters a module gathers, its hooks, and a run of its forward;
* ``gathering.py``: one gathering of one parameter: the values that forward sees, what it wrote into
  them, and the same once more for backward;
* ``saved.py``: the hooks by which autograd saves views of gathered values without the values;
* ``prefetch.py``: sending for the next parameters while these are used; ``prefetch_operands.py``:
  the same for split parameters that ops gather for themselves;
* ``step.py``: the layout that an optimizer steps in; ``master_weights.py``: copies in float32.

Gradients are reduced by ``autograd/``, as the backward of the boxing (``movement/boxed.py``).
"""
