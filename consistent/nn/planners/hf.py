"""Plan a transformers model by its own tensor-parallel plan, ``model.tp_plan``.

Each word of that plan gives the layout of a module or parameter. Instructions to convert between
local and distributed tensors are ignored, since all tensors are global here: an output marked as
"gathered" keeps its layout, and is gathered where an op needs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ...spec import B, Split
from ...spec.nearest import suggestion
from ..plan import Border, Layouts, Plan
from ..plan.names import match_path
from .asked import Asked

_Style = Callable[[Plan, Asked, str], None]


def plan_hf(asked: Asked) -> Plan:
    """Return the layouts that a transformers model's ``tp_plan`` gives its tensors and modules.

    Raises:
        ValueError: the model has no plan, or its plan has an unknown word.
    """
    words = _words_of(asked.module)
    plan = Plan()
    names = [name for name, _ in asked.module.named_modules(remove_duplicate=False)]
    names += [name for all_names in asked.names.values() for name in all_names]
    for name in names:
        pattern = match_path(name, words)
        if pattern is not None:
            _style(words[pattern], pattern, type(asked.module).__name__)(plan, asked, name)
    return plan


def _words_of(module: nn.Module) -> Mapping[str, str]:
    """Return the model's own plan: pattern of a name -> word, such as ``"colwise"``.

    Raises:
        ValueError: the model has none.
    """
    words = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not words:
        config = getattr(module, "config", None)
        words = getattr(config, "base_model_tp_plan", None)
    if not words:
        raise ValueError(
            f"parallelize: {type(module).__name__} carries no plan of its own (tp_plan is empty). "
            'Use plan="tensor", which finds attention and MLPs from the module tree.'
        )
    return words


def _style(word: str, pattern: str, model: str) -> _Style:
    """Return the function that adds to a plan what ``word`` says of a module or parameter.

    Args:
        word: the word of the model's plan.
        pattern: the pattern of names to which the model's plan gives the word, for the error.
        model: the name of the model's class, for the error.

    Raises:
        ValueError: the word is not known.
    """
    if word not in STYLES:
        raise ValueError(
            f"parallelize: the plan of {model} says {word!r} of {pattern!r}, and this word is not "
            f'known.{suggestion(word, STYLES)} Known are {", ".join(STYLES)}. Use plan="tensor", '
            "or patterns -> SBP."
        )
    return STYLES[word]


# -- words -----------------------------------------------------------------------------------------


def _out_dim(asked: Asked, name: str) -> int:
    """Return the dim of the parameter ``name`` that corresponds to its layer's output.

    0 for a weight [out, in], and 1 for a stack of experts [experts, out, in] or a ``Conv1D``.
    """
    owner, _, _ = name.rpartition(".")
    part = _module(asked, owner)
    if part is not None and type(part).__name__ == "Conv1D":
        return 1
    return _tensor(asked, name).ndim - 2


def _tensor(asked: Asked, name: str) -> torch.Tensor:
    return asked.tensors[asked.first_name(name)]


def _module(asked: Asked, name: str) -> nn.Module | None:
    """Return the submodule ``name``; None if there is none."""
    try:
        return asked.module.get_submodule(name)
    except AttributeError:
        return None


def _split(plan: Plan, asked: Asked, name: str, dim: int) -> None:
    """Add ``S(dim)`` for a parameter to the plan, if the dim has an element for each rank."""
    first = asked.first_name(name)
    if first in asked.tensors and asked.tensors[first].shape[dim] >= asked.ranks:
        plan.tensors[first] = Layouts((Split(dim),))


def _own(asked: Asked, name: str) -> list[str]:
    """Return the names of the parameters that ``name`` stands for.

    That is ``name`` itself if it is a parameter, or a module's weight and bias.
    """
    if asked.first_name(name) in asked.tensors:
        return [name]
    found = [f"{name}.weight", f"{name}.bias"]
    return [n for n in found if asked.first_name(n) in asked.tensors]


def _columns(plan: Plan, asked: Asked, name: str) -> None:
    """Split the output features of a layer, weight and bias, over the ranks."""
    for own in _own(asked, name):
        _split(plan, asked, own, 0 if _tensor(asked, own).ndim == 1 else _out_dim(asked, own))


def _rows(plan: Plan, asked: Asked, name: str) -> None:
    """Split the input features of a layer over the ranks, and reduce its partial sums to B."""
    for own in _own(asked, name):
        if _tensor(asked, own).ndim > 1:
            dim = _out_dim(asked, own)
            last = _tensor(asked, own).ndim - 1
            _split(plan, asked, own, last if dim != last else last - 1)
    if _module(asked, name) is not None:
        plan.modules[name] = Border(outputs={0: (B,)})


def _vocabulary(plan: Plan, asked: Asked, name: str) -> None:
    """Split an embedding over the tokens of the vocabulary, and reduce its partial sums to B."""
    for own in _own(asked, name):
        _split(plan, asked, own, 0)
    plan.modules[name] = Border(outputs={0: (B,)})


def _features(plan: Plan, asked: Asked, name: str) -> None:
    """Split an embedding over its features, and gather its output."""
    for own in _own(asked, name):
        _split(plan, asked, own, 1)
    plan.modules[name] = Border(outputs={0: (B,)})


def _sum(plan: Plan, asked: Asked, name: str) -> None:
    """Reduce a module's output to B."""
    plan.modules[name] = Border(outputs={0: (B,)})


def _experts(plan: Plan, asked: Asked, name: str) -> None:
    """Divide a stack of experts among the ranks, along dim 0."""
    for own in _own(asked, name):
        _split(plan, asked, own, 0)


def _sequence(plan: Plan, asked: Asked, name: str) -> None:
    """Split a module's input and output along the sequence, ``S(1)``."""
    plan.modules[name] = Border({0: (Split(1),)}, {0: (Split(1),)})


def _whole(plan: Plan, asked: Asked, name: str) -> None:
    """Add nothing to the plan: the module is replicated."""
    pass


STYLES: dict[str, _Style] = {
    "colwise": _columns,
    "colwise_rep": _columns,
    "colwise_gather_output": _columns,
    "rowwise": _rows,
    "rowwise_rep": _rows,
    "rowwise_split_input": _rows,
    "embedding_rowwise": _vocabulary,
    "embedding_colwise": _features,
    "packed_colwise": _columns,
    "packed_rowwise": _rows,
    "sequence_parallel": _sequence,
    "replicate": _whole,
    "replicated_with_grad_allreduce": _whole,
    "mla_kv_a_proj": _whole,
    "moe_identity_expert": _whole,
    "all_reduce": _sum,
    "moe_tp_experts": _sum,
    "ep_dispatch_experts": _sum,
    "grouped_gemm": _experts,
    "local_params": _whole,
}
