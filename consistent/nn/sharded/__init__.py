"""ZeRO: parameters that are sharded between uses, and optimizer steps on shards.

What happens to a sharded parameter in a training step:

```
                gather                            release
  stored S   -------------->  whole, in a run  -------------->  stored S; autograd has saved the
     ^   ^   (prefetched)     of its module                     strides and offsets of its views
     |   |                                                             |
     |   |  the last view is taken                             take    |  backward needs a view:
     |   +---------------------------------  whole again  <------------+  gather once more
     |                                            |           (prefetched)
     |   reduce                                   v
     |   gradient stored as S  <---------  gradient of the whole, P
     |
     |   enter the step         leave the step
     +----------------->  layout of the step  ----------> stored as before
                         (or its float32 copy)            (others' parts are gathered)
```

Files:

* ``install.py``: the choice of the module that gathers a parameter;
* ``gathered.py``: the hooks of a module that gathers, and a run of its forward;
* ``saved.py``: what forward does with gathered values: in-place writes, and views that autograd
  saves without the values;
* ``again.py``: the second gather, for backward;
* ``order.py``: which parameters a module gathers, and which are gathered next;
  ``prefetch.py``: gathering the next ones while the present ones are used;
  ``prefetch_operands.py``: the same for split parameters that ops gather themselves;
* ``step.py``: the layout of an optimizer step; ``master_weights.py``: copies in float32.

A call of a module goes down through them:

```
hooks, run of forward     what is gathered, what next
gathered.py ------------> order.py ----------------------> prefetch.py
     |----> movement/boxed.py, once for all parameters
     |----> saved.py ----> again.py, in backward ----> order.py ----> prefetch.py
```

Gradients are reduced by ``autograd/``, as the backward of the boxing (``movement/boxed.py``).
"""
