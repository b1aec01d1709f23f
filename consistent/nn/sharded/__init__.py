"""Sharded parameters (ZeRO), which are whole only while forward, backward or an optimizer needs it.

The life of one of them:

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
* ``gathered.py``: the parameters that a module gathers, its hooks, and a run of its forward;
* ``gathering.py``: one gathering of one parameter: the values that forward sees, its in-place
  writes to them, and the second gather for backward;
* ``saved.py``: the saved-tensor hooks with which autograd saves views without their values;
* ``prefetch.py``: gathering the next parameters while the present ones are used;
  ``prefetch_operands.py``: the same for split parameters that ops gather themselves;
* ``step.py``: the layout of an optimizer step; ``master_weights.py``: copies in float32.

Gradients are reduced by ``autograd/``, as the backward of the boxing (``movement/boxed.py``).
"""
