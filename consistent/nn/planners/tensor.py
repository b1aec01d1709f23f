"""Tensor parallelism: Megatron's layout, found from the module tree.

```
x: B -> columns S(0) -> features split -> rows S(1) -> P -> one all-reduce -> B
```

If one layer computes queries, keys and values one after the other, each rank has columns of each of
them (``S(0, of=...)``), so separating them sends nothing. The same holds for an MLP's gate and the
features that it multiplies. Biases of column layers are split like their outputs; biases of row
layers are replicated, and added once. Embeddings and heads are split over the vocabulary.
Everything else is B.
"""

from __future__ import annotations

from torch import nn

from ...spec import B, S
from ..plan import Border, Layouts, Plan
from ..plan.names import group_by_block
from .asked import PlanRequest
from .experts import split_each_expert
from .roles import Linear, Pair, find_linear_layers, find_pairs

_STACKED_IN = (
    "in_proj_weight holds q, k and v one after the other, and a split by columns would cut across "
    "them: attention is whole on every rank"
)
_EMBEDDINGS = frozenset(
    """embed_tokens wte word_embeddings tok_embeddings embed_in shared token_embedding embed
    word_embedding token_embeddings tokens embedding""".split()
)


def plan_tensor(request: PlanRequest) -> Plan:
    """Return the plan ``"tensor"``, Megatron's: attention and MLPs split by columns and rows.

    Embeddings and heads are split over the vocabulary.
    """
    return plan_and_pairs(request)[0]


def plan_and_pairs(request: PlanRequest) -> tuple[Plan, list[Pair]]:
    """Return the plan ``"tensor"``, and the ``Pair``s (attention, MLPs) that it was made of.

    ``plan_sequence`` adds to both.
    """
    layers = find_linear_layers(request.module)
    layer_pairs = find_pairs(request.module, layers, request.ranks)
    plan = Plan()
    for pair in layer_pairs:
        add_pair(plan, request, pair)
    used_layers = {
        layer.name for pair in layer_pairs for layer in (*pair.columns, *pair.rows, *pair.whole)
    }
    _split_vocabulary(plan, request, {n: x for n, x in layers.items() if n not in used_layers})
    split_each_expert(plan, request)
    for name, part in request.module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            layer_pairs.append(Pair(name, "attention", [], [], note=f"{name}: {_STACKED_IN}"))
    if not any(pair.rows for pair in layer_pairs):
        plan.notes.append("no attention and no MLP was found to split")
    plan.notes += _grouped_notes(layer_pairs)
    return plan, layer_pairs


def add_pair(plan: Plan, request: PlanRequest, pair: Pair) -> None:
    """Add the layouts of a pair's layers to ``plan``.

    Their partial sums are reduced to B at the output of the layers that are split by rows.
    """
    for layer in pair.columns:
        _split_layer(plan, request, layer, layer.out_dim, bias=True)
    for layer in pair.rows:
        _split_layer(plan, request, layer, layer.in_dim, bias=False)
        plan.modules[layer.name] = Border(outputs={0: (B,)})


def _split_layer(plan: Plan, request: PlanRequest, layer: Linear, dim: int, bias: bool) -> None:
    """Add ``S(dim)`` for a layer's weight to the plan; if ``bias``, also S(0) for its bias."""
    parts = layer.parts if dim == layer.out_dim else ()
    _add_split(plan, request, f"{layer.name}.weight", dim, parts)
    if bias and layer.module._parameters.get("bias") is not None:
        _add_split(plan, request, f"{layer.name}.bias", 0, parts)


def _add_split(
    plan: Plan, request: PlanRequest, name: str, dim: int, parts: tuple[int, ...] = ()
) -> None:
    """Add ``S(dim)`` for the tensor ``name`` to the plan, if the dim has an element for each rank.

    With ``parts``, sizes of parts one after the other, each part is split (``S(dim, of=...)``).
    """
    first = request.first_name(name)
    if first in request.tensors and request.tensors[first].shape[dim] >= request.ranks:
        is_even = len(set(parts)) == 1
        entry = S(dim, of=parts[0] if is_even else parts) if parts else S(dim)
        plan.tensors.setdefault(first, Layouts((entry,)))


def _split_vocabulary(plan: Plan, request: PlanRequest, layers: dict[str, Linear]) -> None:
    """Split token embeddings and heads over the vocabulary.

    A head is a linear layer with as many outputs as an embedding has tokens.

    Args:
        plan: the plan, which is changed.
        request: the module and the axis.
        layers: name -> linear layer, of those in no pair.
    """
    sizes: set[int] = set()
    for name, part in request.module.named_modules():
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in _EMBEDDINGS:
            sizes.add(part.num_embeddings)
            _add_split(plan, request, f"{name}.weight", 0)
            plan.modules[name] = Border(outputs={0: (B,)})
    for layer in layers.values():
        if layer.out_features in sizes and layer.leaf not in ("dense",):
            _split_layer(plan, request, layer, layer.out_dim, bias=True)


def _grouped_notes(layer_pairs: list[Pair]) -> list[str]:
    """Return the notes of the pairs, once for all blocks with the same: ``h.{0-11}.attn: ...``."""
    notes: dict[str, list[str]] = {}
    for pair in layer_pairs:
        if pair.note:
            name, _, text = pair.note.partition(": ")
            notes.setdefault(text, []).append(name)
    lines = []
    for text, names in notes.items():
        for group, _, _ in group_by_block(dict.fromkeys(names, text)):
            lines.append(f"{group}: {text}")
    return lines
