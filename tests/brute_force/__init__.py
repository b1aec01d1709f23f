"""Rules proven by running them: each claimed signature on simulated ranks against the op on the
whole.

```
check(torch.mm, a, b)       # every signature that the row of mm claims, on one axis of 3 ranks
check(torch.mm, a, b, ranks=(2, 2))     # on two axes: pairs of signatures, each kind of pair once
missing(torch.mm, a, b)                 # signatures that hold by value and are not claimed
```

`a` and `b` are whole tensors. Inputs are scattered as a signature says, P split at random and
unevenly, so that no wrong rule passes by luck; what dispatch would run is run on each shard, and
the gathered outputs must be those of torch on the whole. Then gradients: the outputs' cotangents
are scattered in the dual SBPs, and the gathered gradients of the inputs must be torch's (P(max)
and P(min) have none). Tensors that the op writes to are compared as well. Forms also run on meta
shards, as on a rank outside the placement.

Read `called.py` (a call taken apart), `expected.py` (what torch makes of it),
`combinations.py` (signatures of several axes), `proof.py`.
"""

from tests.brute_force.called import Called, replaced, tensors_in
from tests.brute_force.expected import Expected, fixed
from tests.brute_force.missing import missing
from tests.brute_force.proof import Earlier, Example, check, example, prove

__all__ = [
    "Called",
    "Earlier",
    "Example",
    "Expected",
    "check",
    "example",
    "fixed",
    "missing",
    "prove",
    "replaced",
    "tensors_in",
]
