"""Context parallelism: every rank has the whole module, and a part of each sequence.

```
ranks         0        1        2                        causal attention
tokens      0 1 a b   2 3 8 9   4 5 6 7                  each rank has a rectangle and two triangles
```

Inputs of the module are split along the sequence, ``S(1, cut="zigzag")``. Position ids, rotary
tables, masks and labels are replicated, and each rank uses the part for its tokens, as with any
replicated operand. Until the loss, only attention communicates; its rule chooses how
(``rules/families/layers/attention.py``). Gradients of parameters are summed as in ``data``.
"""

from __future__ import annotations

import inspect

import torch

from ...spec import S
from ..plan import Border, Plan
from .asked import PlanRequest

# Arguments with a sequence: token ids [batch, sequence], activations [batch, sequence, features].
SEQUENCE_ARGUMENTS = (
    0, "input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds",
    "hidden_states", "x",
)  # fmt: skip
SEQUENCE = S(1, cut="zigzag")


def plan_context(request: PlanRequest) -> Plan:
    """Return the plan in which all tensors are B (replicated) and the input sequences are split.

    The inputs of a decoder inside are split, too, since the module may make them from labels, which
    are whole.
    """
    plan = Plan()
    for name, module in request.module.named_modules():
        if not name or (name.endswith("decoder") and _takes_tokens(module)):
            plan.modules[name] = Border({key: (SEQUENCE,) for key in SEQUENCE_ARGUMENTS}, {})
    return plan


def _takes_tokens(module: torch.nn.Module) -> bool:
    """Return whether the module's forward has an argument ``input_ids``."""
    return "input_ids" in inspect.signature(module.forward).parameters


def takes_whole_sequences(plan: Plan) -> bool:
    """Return whether ``plan`` is one of context parallelism, which splits the inputs of the model.

    Each rank then has to pass whole sequences, so ``parallelize`` takes plain input tensors as B.
    """
    border = plan.border("")
    return border is not None and any(SEQUENCE in nd for nd in border.inputs.values())
