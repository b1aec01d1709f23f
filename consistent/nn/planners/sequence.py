"""Tensor and sequence parallelism: between blocks, activations are split along the sequence.

```
S(1) -norm-> S(1) -all_gather-> B -> columns -> rows -> P -reduce_scatter-> S(1)
```

An all-gather and a reduce-scatter together send as much as the all-reduce of ``tensor``. Norms,
dropout and residuals run on shards of the sequence.
"""

from __future__ import annotations

import re

from ...spec import B, Split
from ..plan import Border, Plan
from .asked import PlanRequest
from .roles import Linear, Pair
from .tensor import plan_and_pairs

# Arguments with which a block gets activations.
_ACTIVATIONS = (0, "hidden_states", "x", "key_value_states", "encoder_hidden_states")
_MIXTURE = re.compile(r"moe|sparse|mixture", re.IGNORECASE)
_SEQUENCE = Split(1)  # of [batch, sequence, features]


def plan_sequence(request: PlanRequest) -> Plan:
    """Return the plan ``"tensor+sequence"``: ``"tensor"`` with activations split between blocks.

    Activations [batch, sequence, features] are split along the sequence there, S(1).
    """
    plan, pairs = plan_and_pairs(request)
    split = [pair for pair in pairs if pair.rows]
    if not any(pair.kind == "attention" for pair in split):
        plan.notes.append("no attention was split, so the sequence is not either")
        return plan
    for name, border in plan.modules.items():
        plan.modules[name] = Border(border.inputs, {0: (_SEQUENCE,)})
    for pair in pairs:
        _gather_inputs(plan, request, pair)
    for name in _vocabulary_heads(plan, request, pairs):
        _gather_arguments(plan, name, (0,))
    for name, part in request.module.named_modules():
        if _MIXTURE.search(type(part).__name__) and hasattr(part, "experts"):
            plan.modules[name] = Border({key: (B,) for key in _ACTIVATIONS}, {0: (_SEQUENCE,)})
    return plan


def _gather_inputs(plan: Plan, request: PlanRequest, pair: Pair) -> None:
    """Make ``plan`` gather the input of a pair's first layers, once for layers that share it.

    Args:
        plan: the plan, which is changed.
        request: the module and the axis.
        pair: attention or an MLP.
    """
    layers: list[Linear] = [*pair.columns, *pair.whole]
    if len(layers) == 1:
        _gather_arguments(plan, layers[0].name, (0,))
    elif layers and pair.kind == "attention":
        _gather_arguments(plan, pair.name, _ACTIVATIONS)
    elif layers and _has_only_layers_of(request, pair):
        _gather_arguments(plan, pair.name, _ACTIVATIONS)
    else:
        for layer in layers:
            _gather_arguments(plan, layer.name, (0,))


def _has_only_layers_of(request: PlanRequest, pair: Pair) -> bool:
    """Return whether the pair's module has no parameters besides those of the pair's layers.

    Then it is the MLP itself, and not a block around it.
    """
    own_ids = {id(p) for p in request.module.get_submodule(pair.name).parameters()}
    layer_ids = {id(p) for x in (*pair.columns, *pair.rows) for p in x.module.parameters()}
    return own_ids <= layer_ids


def _gather_arguments(plan: Plan, name: str, arguments: tuple[int | str, ...]) -> None:
    """Make ``plan`` gather arguments of the module ``name``, by their positions or keywords."""
    outputs = plan.modules[name].outputs if name in plan.modules else {}
    plan.modules[name] = Border({key: (B,) for key in arguments}, outputs)


def _vocabulary_heads(plan: Plan, request: PlanRequest, pairs: list[Pair]) -> list[str]:
    """Return the names of split linear layers that belong to no pair: heads over the vocabulary."""
    pair_layers = {
        layer.name for pair in pairs for layer in (*pair.columns, *pair.rows, *pair.whole)
    }
    heads = []
    for name, part in request.module.named_modules():
        weight = request.first_name(f"{name}.weight")
        if weight in plan.tensors and name not in pair_layers and hasattr(part, "out_features"):
            heads.append(name)
    return heads
