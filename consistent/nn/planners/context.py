"""context: every rank has all of the module, and a part of each sequence.

```
ranks         0        1        2                        causal attention
tokens      0 1 a b   2 3 8 9   4 5 6 7                  each rank has a rectangle and two triangles
```

What the module is given is cut along the sequence, ``S(1, cut="zigzag")``; position ids, rotary
tables, masks and labels are whole, and each rank takes of them what belongs to its tokens, as it
does of any operand that is whole. So nothing but attention sends anything until the loss, and
gradients of parameters are summed as in data. Attention chooses for itself how
(``rules/families/layers/attention.py``).
"""

from __future__ import annotations

import inspect

import torch

from ...spec import S
from ..plan import Border, Plan
from .asked import Asked

# Arguments that have a sequence: token ids, [batch, sequence], and activations, with features.
GIVEN = (
    0, "input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds",
    "hidden_states", "x",
)  # fmt: skip
SEQUENCE = S(1, cut="zigzag")


def plan_context(asked: Asked) -> Plan:
    """All B, and the sequences that the module is given are cut, and those that a decoder inside
    is given, which it may have made of labels."""
    plan = Plan()
    for name, module in asked.module.named_modules():
        if not name or (name.endswith("decoder") and _takes_tokens(module)):
            plan.modules[name] = Border({key: (SEQUENCE,) for key in GIVEN}, {})
    return plan


def _takes_tokens(module: torch.nn.Module) -> bool:
    return "input_ids" in inspect.signature(module.forward).parameters


def takes_whole(plan: Plan) -> bool:
    """Whether the plan cuts what the module is given, so that plain tensors are to be taken as
    whole."""
    border = plan.border("")
    return border is not None and any(SEQUENCE in nd for nd in border.inputs.values())
