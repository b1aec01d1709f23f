"""Find attention and MLP pairs among the linear layers of a module, from the module tree.

A pair is the unit that Megatron splits: layers split by *columns* first (each rank computes some of
the features), then layers split by *rows* (each rank uses its features, and the results are
summed). Attention is found by the names that models give to q, k, v and the output, and an MLP by
its widths, d -> m and m -> d in one block. Other layers are left whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

QUERY = frozenset(
    "q_proj query q q_lin query_proj to_q wq q_attn q_b_proj linear_q w_q q_linear queries".split()
)
KEY = frozenset("k_proj key k k_lin key_proj to_k wk linear_k w_k k_linear keys".split())
VALUE = frozenset("v_proj value v v_lin value_proj to_v wv linear_v w_v v_linear values".split())
# Layers that compute q, k and v together, with their columns one after the other or by heads.
FUSED = frozenset(
    """c_attn qkv qkv_proj Wqkv in_proj_qkv att_proj to_qkv qkv_linear query_key_value
    kv_b_proj""".split()
)
# Those of FUSED with q, k and v one after the other: each rank gets a shard of each of them. With
# another order, the op that separates q, k and v exchanges the columns of other ranks' heads.
STACKED = frozenset("c_attn qkv qkv_proj Wqkv".split())
# Layers that compute both an MLP's gate and the features that the gate multiplies.
FUSED_GATE = frozenset("gate_up_proj up_gate_proj gate_up Wi w12 fc12".split())
OUT = frozenset(
    """o_proj out_proj dense out_lin o to_out c_proj wo proj Wo linear_out projection w_o out
    o_linear fc_o""".split()
)


@dataclass
class Linear:
    """A linear layer ``y = x @ w + b`` of a module, whose weight is stored as w or transposed.

    Attributes:
        name, module: the layer's name, and the layer.
        in_features, out_features: the numbers of its input and output features.
        out_dim: the dim of the weight that corresponds to the output.
        parts: sizes of the parts that are one after the other in the output, such as q, k and v;
            empty if it has no parts.
    """

    name: str
    module: nn.Module
    in_features: int
    out_features: int
    out_dim: int  # the dim of the weight that corresponds to the output
    parts: tuple[int, ...] = ()  # sizes of the parts stacked in the output, such as q, k and v

    @property
    def in_dim(self) -> int:
        """Return the dim of the weight that corresponds to the input."""
        return 1 - self.out_dim

    @property
    def leaf(self) -> str:
        """Return the last part of the layer's name: ``q_proj`` of ``layers.0.attn.q_proj``."""
        return self.name.rpartition(".")[2]


@dataclass
class Pair:
    """Attention or an MLP: layers to split by columns, and layers after them to split by rows.

    Split by columns, each rank computes some features; split by rows, it uses these, and the
    results of all ranks are summed.

    Attributes:
        name: the module that has q, k and v, or in which the MLP was found.
        kind: ``"attention"`` or ``"mlp"``.
        columns, rows: the layers to split in each way.
        whole: its layers that are not split.
        note: why they are not split, for the plan.
    """

    name: str
    kind: str  # "attention" or "mlp"
    columns: list[Linear]
    rows: list[Linear]
    whole: list[Linear] = field(default_factory=list)  # layers that are not split
    note: str = ""


def find_linear_layers(module: nn.Module) -> dict[str, Linear]:
    """Return name -> linear layer of ``module``: ``nn.Linear``, and ``Conv1D`` of transformers.

    Each layer is returned once.
    """
    layers: dict[str, Linear] = {}
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):  # its layers are not Python modules
            continue
        weight = part._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            continue
        if isinstance(part, nn.Linear):
            layers[name] = Linear(name, part, weight.shape[1], weight.shape[0], 0)
        elif type(part).__name__ == "Conv1D" and hasattr(part, "nf"):
            layers[name] = Linear(name, part, weight.shape[0], weight.shape[1], 1)
    return layers


def find_pairs(module: nn.Module, layers: Mapping[str, Linear], ranks: int) -> list[Pair]:
    """Return the attention and MLP ``Pair``s of ``module``, attention first.

    Args:
        module: the module.
        layers: name -> linear layer, from ``find_linear_layers``.
        ranks: the number of ranks, by which heads and widths must be divisible.
    """
    free, inside = dict(layers), _layers_by_module(layers)
    attention = list(_attention_pairs(module, free, inside, ranks))
    return attention + list(_mlp_pairs(module, free, inside))


def _layers_by_module(layers: Mapping[str, Linear]) -> dict[str, list[Linear]]:
    """Return module name -> the linear layers inside that module, in order."""
    layers_of: dict[str, list[Linear]] = {"": list(layers.values())}
    for name, layer in layers.items():
        parent = name.rpartition(".")[0]
        while parent:
            layers_of.setdefault(parent, []).append(layer)
            parent = parent.rpartition(".")[0]
    return layers_of


# -- attention -------------------------------------------------------------------------------------


def _attention_pairs(
    module: nn.Module, free: dict[str, Linear], inside: Mapping[str, list[Linear]], ranks: int
) -> Iterator[Pair]:
    """Yield the attention ``Pair``s: modules whose children are named as q, k and v are.

    Args:
        module: the module.
        free: the layers that are in no pair; those that are used are removed.
        inside: module name -> the linear layers inside it.
        ranks: the number of ranks.
    """
    for name, part in module.named_modules():
        children = {n: free[f"{name}.{n}".lstrip(".")] for n, _ in part.named_children()
               if f"{name}.{n}".lstrip(".") in free}  # fmt: skip
        qkv = [children[n] for names in (QUERY, KEY, VALUE) for n in children if n in names]
        fused = [children[n] for n in children if n in FUSED]
        counts = [sum(n in names for n in children) for names in (QUERY, KEY, VALUE)]
        if not (fused or all(counts)):
            continue
        parent = name.rpartition(".")[0]
        parent_layers = [x for x in inside.get(parent, ()) if x.name in free] if parent else []
        out = _output_layer(parent, children, parent_layers, qkv + fused)
        pair = Pair(name, "attention", qkv + fused, [out] if out else [])
        for layer in (*pair.columns, *pair.rows):
            free.pop(layer.name, None)
        yield _split_or_whole(module, part, pair, ranks)


def _output_layer(
    parent: str,
    children: Mapping[str, Linear],
    parent_layers: Sequence[Linear],
    qkv: Sequence[Linear],
) -> Linear | None:
    """Return the output layer of attention; None if it was not found.

    It is a sibling of q, k and v, or among ``parent_layers``, those of the module ``parent``.

    Args:
        parent: the name of the parent of the module that has q, k and v.
        children: key -> linear layer, of the module that has q, k and v.
        parent_layers: the linear layers in the parent.
        qkv: the layers of q, k and v.
    """
    for n, layer in children.items():
        if n in OUT and layer not in qkv:
            return layer
    candidates = [
        layer
        for layer in parent_layers
        if layer not in qkv
        and layer.leaf in OUT
        and layer.name[len(parent) + 1 :].count(".") <= 1
        and "intermediate" not in layer.name
    ]
    return candidates[0] if len(candidates) == 1 else None


def _split_or_whole(module: nn.Module, part: nn.Module, pair: Pair, ranks: int) -> Pair:
    """Return ``pair``; if it cannot be split over ``ranks``, with all layers whole and a note.

    Args:
        module: the whole module, whose configuration may have the number of heads.
        part: the module that has q, k and v.
        pair: the pair, which is changed.
        ranks: the number of ranks.
    """
    heads = heads_of(module, part)
    if not pair.rows:
        reason = "its output layer was not found"
    elif heads is None:
        reason = "its number of heads was not found"
    elif any(n % ranks for n in heads):
        counts = " and ".join(map(str, dict.fromkeys(heads)))
        reason = f"{counts} heads do not divide by {ranks} ranks"
    elif any(
        layer.out_features % ranks or layer.in_features % ranks
        for layer in (*pair.columns, *pair.rows)
    ):
        reason = f"its widths do not divide by {ranks} ranks"
    else:
        for layer in pair.columns:
            layer.parts = _stacked_sizes(part, layer, heads)
        return pair
    pair.note = f"{pair.name}: attention is whole on every rank: {reason}"
    pair.whole, pair.columns, pair.rows = [*pair.columns, *pair.rows], [], []
    return pair


def _stacked_sizes(part: nn.Module, layer: Linear, heads: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of q, k and v in a layer that computes them one after the other.

    Empty if it computes only one of them, or in another order. With 8 query heads, 2 key heads and
    heads of 4: (32, 8, 8).

    Args:
        part: the module that has the layer.
        layer: the layer.
        heads: the numbers of query heads and of key heads.
    """
    count, keys = heads
    if layer.leaf not in STACKED or layer.out_features % (count + 2 * keys):
        return ()
    if type(part).__name__.startswith("CodeGen"):  # stacks q, k and v in each of four head groups
        return ()
    width = layer.out_features // (count + 2 * keys)
    return count * width, keys * width, keys * width


_HEADS = "num_heads num_attention_heads n_heads n_head num_q_heads n_local_heads heads".split()
_KEY_HEADS = "num_key_value_heads num_kv_heads n_kv_heads n_head_kv".split()


def heads_of(module: nn.Module, part: nn.Module) -> list[int] | None:
    """Return [number of query heads, number of key heads]; None if they are not known.

    They are read from attributes of ``part``, or of its configuration or that of ``module``.
    """
    for holder in (part, getattr(part, "config", None), getattr(module, "config", None)):
        heads = _first_positive_int(holder, _HEADS)
        if heads is not None:
            keys = _first_positive_int(holder, _KEY_HEADS)
            if keys is None:
                keys = _first_positive_int(getattr(part, "config", None), _KEY_HEADS)
            return [heads, keys or heads]
    return None


def _first_positive_int(holder: Any, names: Sequence[str]) -> int | None:
    """Return the first attribute of ``holder`` among ``names`` that is a positive int, or None."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


# -- MLPs ------------------------------------------------------------------------------------------


def _mlp_pairs(
    module: nn.Module, free: dict[str, Linear], inside: Mapping[str, list[Linear]]
) -> Iterator[Pair]:
    """Yield the MLP ``Pair``s, searched from the innermost modules outwards.

    A pair has layers d -> m, or one layer d -> 2m, and after them one layer m -> d.

    Args:
        module: the module.
        free: the layers that are in no pair; those that are used are removed.
        inside: module name -> the linear layers inside it.
    """
    names = [name for name, _ in module.named_modules()]
    for name in sorted(names, key=lambda n: -n.count(".") - bool(n)):
        layers = [layer for layer in inside.get(name, ()) if layer.name in free]
        if len(layers) < 2 or _has_module_list(module.get_submodule(name)):
            continue
        for pair in _mlp_pairs_in(name, layers):
            for layer in (*pair.columns, *pair.rows):
                free.pop(layer.name, None)
            yield pair


def _has_module_list(part: nn.Module) -> bool:
    """Return whether ``part`` has a list of modules, which need not run one after the other.

    MLPs are searched in the modules of the list instead.
    """
    return any(isinstance(m, nn.ModuleList) and len(m) for m in part.modules())


def _mlp_pairs_in(name: str, layers: Sequence[Linear]) -> Iterator[Pair]:
    """Yield the MLP ``Pair``s among ``layers``, the linear layers of one module in order.

    ``name`` is the name of that module.
    """
    candidates = _CandidateColumns(name, layers)
    for down in layers:
        ups = candidates.before(down) if down.in_features > 1 else []
        if ups and not (down.in_features == down.out_features and len(ups) > 2):
            for up in ups:
                up.parts = (
                    (down.in_features, down.in_features)
                    if up.out_features == 2 * down.in_features
                    else ()
                )
            candidates.leave(ups)
            yield Pair(name, "mlp", ups, [down])
        else:
            candidates.add(down)


class _CandidateColumns:
    """Linear layers of a module that may still become the columns of an MLP ``Pair``.

    A *part* is a child of the module, such as an actor or a critic. A layer's output may go to
    another layer of the same part, or from the end of one part to the beginning of another part.

    Args:
        name: the name of the module.
        layers: all of its linear layers.
    """

    def __init__(self, name: str, layers: Sequence[Linear]) -> None:
        self._depth = name.count(".") + 1 if name else 0
        self._layers_of_part: dict[tuple[str, ...], list[Linear]] = {}  # all layers of each part
        for layer in layers:
            self._layers_of_part.setdefault(self._part_of(layer), []).append(layer)
        # (input width, output width) -> part -> the layers that may become columns
        self._candidates: dict[tuple[int, int], dict[tuple[str, ...], list[Linear]]] = {}

    def add(self, layer: Linear) -> None:
        """Add a layer, which may become columns of a pair with a later layer."""
        by_part = self._candidates.setdefault(_widths(layer), {})
        by_part.setdefault(self._part_of(layer), []).append(layer)

    def before(self, down: Linear) -> list[Linear]:
        """Return the layers added so far whose outputs may be the input of ``down``, by widths."""
        by_part, part = (
            self._candidates.get((down.out_features, down.in_features), {}),
            self._part_of(down),
        )
        if self._layers_of_part[part][0] is not down:
            return list(by_part.get(part, ()))
        for other_part, layers in list(by_part.items()):
            # No later layer takes the rest.
            by_part[other_part] = self._last_layers(other_part, layers)
        return [layer for layers in by_part.values() for layer in layers]

    def leave(self, layers: Sequence[Linear]) -> None:
        """Remove layers that became columns of a pair, with those of the same part and widths."""
        for layer in layers:
            self._candidates[_widths(layer)].pop(self._part_of(layer), None)

    def _last_layers(self, part: tuple[str, ...], layers: list[Linear]) -> list[Linear]:
        """Return those of ``layers`` that are the last layers of ``part``."""
        count = 0
        for layer, last in zip(reversed(layers), reversed(self._layers_of_part[part])):
            if layer is not last:
                break
            count += 1
        return layers[len(layers) - count :]

    def _part_of(self, layer: Linear) -> tuple[str, ...]:
        """Return the name of the module's child that has ``layer``, split at the dots."""
        return tuple(layer.name.split(".")[: self._depth + 1])


def _widths(layer: Linear) -> tuple[int, int]:
    """Return (input width of ``layer``, input width of a layer that takes its output).

    The latter is half the output width for a layer that computes an MLP's gate, too.
    """
    if layer.leaf in FUSED_GATE and layer.out_features % 2 == 0:
        return layer.in_features, layer.out_features // 2
    return layer.in_features, 0 if layer.leaf in FUSED_GATE else layer.out_features
