"""What ops, messages and copies cost on a machine: its figures, and the formulas for seconds.

```
figures and formulas        CostModel                          model, messages
what one call of an op is   Work; flops of products by shape   work, flops
machines without a name     BUILT_IN, one for a device type    built_in
```

Everything that estimates seconds takes a ``CostModel``: boxing and the choices of single ops take a
built-in one, searches that of the ranks they plan for (``movement/speeds.py``), simulations a named
machine (``auto/machines``).
"""
