"""Tensor and sequence parallelism: between blocks, activations are split along the sequence.

```
S(1) -norm-> S(1) -all_gather-> B -> columns -> rows -> P -reduce_scatter-> S(1)
```

An all-gather and a reduce-scatter together send as much as the all-reduce of ``tensor``. Norms,
dropout and residuals run on pieces of the sequence.
"""

from __future__ import annotations

import re

from ...spec import B, Split
from ..plan import Border, Plan
from .asked import Asked
from .roles import Linear, Pair
from .tensor import lay_out

# Arguments with which a block gets activations.
_GIVEN = (0, "hidden_states", "x", "key_value_states", "encoder_hidden_states")
_MIXTURE = re.compile(r"moe|sparse|mixture", re.IGNORECASE)
_SEQUENCE = Split(1)  # of [batch, sequence, features]


def plan_sequence(asked: Asked) -> Plan:
    """Return the plan ``"tensor+sequence"``: ``"tensor"`` with activations split between blocks.

    Activations [batch, sequence, features] are split along the sequence there, S(1).
    """
    plan, pairs = lay_out(asked)
    split = [pair for pair in pairs if pair.rows]
    if not any(pair.kind == "attention" for pair in split):
        plan.notes.append("no attention was split, so the sequence is not either")
        return plan
    for name, border in plan.modules.items():
        plan.modules[name] = Border(border.inputs, {0: (_SEQUENCE,)})
    for pair in pairs:
        _gather_before(plan, asked, pair)
    for name in _heads(plan, asked, pairs):
        _gather(plan, name, (0,))
    for name, part in asked.module.named_modules():
        if _MIXTURE.search(type(part).__name__) and hasattr(part, "experts"):
            plan.modules[name] = Border({key: (B,) for key in _GIVEN}, {0: (_SEQUENCE,)})
    return plan


def _gather_before(plan: Plan, asked: Asked, pair: Pair) -> None:
    """Make ``plan`` gather the input of a pair's first layers, once for layers that share it.

    Args:
        plan: the plan, which is changed.
        asked: the module and the axis.
        pair: attention or an MLP.
    """
    layers: list[Linear] = [*pair.columns, *pair.whole]
    if len(layers) == 1:
        _gather(plan, layers[0].name, (0,))
    elif layers and pair.kind == "attention":
        _gather(plan, pair.name, _GIVEN)
    elif layers and _holds_only(asked, pair):
        _gather(plan, pair.name, _GIVEN)
    else:
        for layer in layers:
            _gather(plan, layer.name, (0,))


def _holds_only(asked: Asked, pair: Pair) -> bool:
    """Return whether the pair's module has no parameters besides those of the pair's layers.

    Then it is the MLP itself, and not a block around it.
    """
    own = {id(p) for p in asked.module.get_submodule(pair.name).parameters()}
    layers = {id(p) for x in (*pair.columns, *pair.rows) for p in x.module.parameters()}
    return own <= layers


def _gather(plan: Plan, name: str, given: tuple[int | str, ...]) -> None:
    """Make ``plan`` gather arguments of the module ``name``, by their positions or keywords."""
    outputs = plan.modules[name].outputs if name in plan.modules else {}
    plan.modules[name] = Border({key: (B,) for key in given}, outputs)


def _heads(plan: Plan, asked: Asked, pairs: list[Pair]) -> list[str]:
    """Return the names of split linear layers that belong to no pair: heads over the vocabulary."""
    taken = {layer.name for pair in pairs for layer in (*pair.columns, *pair.rows, *pair.whole)}
    found = []
    for name, part in asked.module.named_modules():
        weight = asked.first_name(f"{name}.weight")
        if weight in plan.tensors and name not in taken and hasattr(part, "out_features"):
            found.append(name)
    return found
