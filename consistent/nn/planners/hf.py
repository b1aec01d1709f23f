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
from .asked import PlanRequest

_Style = Callable[[Plan, PlanRequest, str], None]


def plan_hf(request: PlanRequest) -> Plan:
    """Return the layouts that a transformers model's ``tp_plan`` gives its tensors and modules.

    Raises:
        ValueError: the model has no plan, or its plan has an unknown word.
    """
    words = _words_of(request.module)
    plan = Plan()
    names = [name for name, _ in request.module.named_modules(remove_duplicate=False)]
    names += [name for all_names in request.names.values() for name in all_names]
    for name in names:
        pattern = match_path(name, words)
        if pattern is not None:
            _style(words[pattern], pattern, type(request.module).__name__)(plan, request, name)
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


def _out_dim(request: PlanRequest, name: str) -> int:
    """Return the dim of the parameter ``name`` that corresponds to its layer's output.

    0 for a weight [out, in], and 1 for a stack of experts [experts, out, in] or a ``Conv1D``.
    """
    owner, _, _ = name.rpartition(".")
    part = _module(request, owner)
    if part is not None and type(part).__name__ == "Conv1D":
        return 1
    return _tensor(request, name).ndim - 2


def _tensor(request: PlanRequest, name: str) -> torch.Tensor:
    return request.tensors[request.first_name(name)]


def _module(request: PlanRequest, name: str) -> nn.Module | None:
    """Return the submodule ``name``; None if there is none."""
    try:
        return request.module.get_submodule(name)
    except AttributeError:
        return None


def _add_split(plan: Plan, request: PlanRequest, name: str, dim: int) -> None:
    """Add ``S(dim)`` for a parameter to the plan, if the dim has an element for each rank."""
    first = request.first_name(name)
    if first in request.tensors and request.tensors[first].shape[dim] >= request.ranks:
        plan.tensors[first] = Layouts((Split(dim),))


def _parameter_names(request: PlanRequest, name: str) -> list[str]:
    """Return the names of the parameters that ``name`` stands for.

    That is ``name`` itself if it is a parameter, or a module's weight and bias.
    """
    if request.first_name(name) in request.tensors:
        return [name]
    candidates = [f"{name}.weight", f"{name}.bias"]
    return [n for n in candidates if request.first_name(n) in request.tensors]


def _split_columns(plan: Plan, request: PlanRequest, name: str) -> None:
    """Split the output features of a layer, weight and bias, over the ranks."""
    for param in _parameter_names(request, name):
        _add_split(
            plan,
            request,
            param,
            0 if _tensor(request, param).ndim == 1 else _out_dim(request, param),
        )


def _split_rows(plan: Plan, request: PlanRequest, name: str) -> None:
    """Split the input features of a layer over the ranks, and reduce its partial sums to B."""
    for param in _parameter_names(request, name):
        if _tensor(request, param).ndim > 1:
            dim = _out_dim(request, param)
            last = _tensor(request, param).ndim - 1
            _add_split(plan, request, param, last if dim != last else last - 1)
    if _module(request, name) is not None:
        plan.modules[name] = Border(outputs={0: (B,)})


def _split_vocabulary(plan: Plan, request: PlanRequest, name: str) -> None:
    """Split an embedding over the tokens of the vocabulary, and reduce its partial sums to B."""
    for param in _parameter_names(request, name):
        _add_split(plan, request, param, 0)
    plan.modules[name] = Border(outputs={0: (B,)})


def _split_features(plan: Plan, request: PlanRequest, name: str) -> None:
    """Split an embedding over its features, and gather its output."""
    for param in _parameter_names(request, name):
        _add_split(plan, request, param, 1)
    plan.modules[name] = Border(outputs={0: (B,)})


def _reduce_output(plan: Plan, request: PlanRequest, name: str) -> None:
    """Reduce a module's output to B."""
    plan.modules[name] = Border(outputs={0: (B,)})


def _split_experts(plan: Plan, request: PlanRequest, name: str) -> None:
    """Divide a stack of experts among the ranks, along dim 0."""
    for param in _parameter_names(request, name):
        _add_split(plan, request, param, 0)


def _split_sequence(plan: Plan, request: PlanRequest, name: str) -> None:
    """Split a module's input and output along the sequence, ``S(1)``."""
    plan.modules[name] = Border({0: (Split(1),)}, {0: (Split(1),)})


def _leave_replicated(plan: Plan, request: PlanRequest, name: str) -> None:
    """Add nothing to the plan: the module is replicated."""
    pass


STYLES: dict[str, _Style] = {
    "colwise": _split_columns,
    "colwise_rep": _split_columns,
    "colwise_gather_output": _split_columns,
    "rowwise": _split_rows,
    "rowwise_rep": _split_rows,
    "rowwise_split_input": _split_rows,
    "embedding_rowwise": _split_vocabulary,
    "embedding_colwise": _split_features,
    "packed_colwise": _split_columns,
    "packed_rowwise": _split_rows,
    "sequence_parallel": _split_sequence,
    "replicate": _leave_replicated,
    "replicated_with_grad_allreduce": _leave_replicated,
    "mla_kv_a_proj": _leave_replicated,
    "moe_identity_expert": _leave_replicated,
    "all_reduce": _reduce_output,
    "moe_tp_experts": _reduce_output,
    "ep_dispatch_experts": _reduce_output,
    "grouped_gemm": _split_experts,
    "local_params": _leave_replicated,
}
