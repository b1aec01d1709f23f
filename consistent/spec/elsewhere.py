"""Names of other libraries (DTensor, OneFlow, ...) for what is called differently here.

Errors about an unknown name use them for hints. None of these names is defined: ``hasattr(x,
"full_tensor")``, by which code recognizes a DTensor, stays False. An entry without a library is a
name that people try, and that several libraries have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from .nearest import suggestion

_SBPS = "with S(d) for Shard(d), B for Replicate() and P for Partial()"
_MESH = 'consistent.placement("cpu", ranks=[[0, 1], [2, 3]], axes=("dp", "tp"))'
_PLAN = 'consistent.parallelize(model, placement, "tensor"), or patterns of names -> SBP'
_ZERO3 = 'consistent.parallelize(model, placement, "zero3")'
_MIRRORED_VIEW = "mirrored's view: x.to_mirrored(), ops on its elements, and .to_global(sbp) back"
_SHARD = "x.to_local(), this rank's shard"
_BOXING = "x.to_global(sbp=...), a boxing"
_COLLECTIVE = "x.to_global(sbp=...), a boxing; of plain tensors mirrored's function of this name"
_RANK, _SIZE = "mirrored.current().rank", "mirrored.current().size"
_NO_INIT = "nothing: the first global tensor joins the ranks, as the launcher says"
_LOADER = "consistent.data.loader(DataLoader(...), placement)"

# Attribute of a tensor -> (library that has the name, or "", what to write here).
TENSOR_HINTS: dict[str, tuple[str, str]] = {
    "redistribute": ("DTensor", f"x.to_global(placement, sbp=S(0)), {_SBPS}"),
    "full_tensor": ("DTensor", "x.full(), on every rank"),
    "device_mesh": ("DTensor", "x.placement"),
    "placements": ("DTensor", f"x.sbp, {_SBPS}"),
    "from_local": ("DTensor", "consistent.from_local(shard, placement, sbp)"),
    "_local_tensor": ("DTensor", "x.to_local()"),
    "sharding": ("JAX", "x.placement and x.sbp"),
    "addressable_shards": ("JAX", f"{_SHARD}, or x.to_mirrored()"),
    "addressable_data": ("JAX", "x.to_local()"),
    "global_shards": ("JAX", "x.to_local() on each rank"),
    "block_until_ready": ("JAX", "nothing on CPU ranks, and torch.cuda.synchronize() on GPUs"),
    "is_fully_addressable": ("JAX", "x.placement.size == 1"),
    "is_fully_replicated": ("JAX", "all(entry.is_broadcast for entry in x.sbp)"),
    "to_consistent": ("OneFlow", "x.to_global(placement, sbp)"),
    "local_to_global": ("OneFlow", "consistent.from_local(shard, placement, sbp)"),
    "global_to_global": ("OneFlow", "x.to_global(placement, sbp)"),
    "is_consistent": ("OneFlow", "x.is_global"),
    "is_local": ("OneFlow", "not x.is_global"),
    "local": ("", _SHARD),
    "local_tensor": ("", _SHARD),
    "local_shard": ("", _SHARD),
    "local_shards": ("", _SHARD),
    "shard": ("", f"{_SHARD}; x.to_global(sbp=S(0)) cuts it again"),
    "shards": ("", _SHARD),
    "mesh": ("", "x.placement"),
    "ranks": ("", "x.placement.ranks"),
    "spec": ("", "x.placement and x.sbp"),
    "is_replicated": ("", "all(entry.is_broadcast for entry in x.sbp)"),
    "is_sharded": ("", "any(entry.is_split for entry in x.sbp)"),
    "replicate": ("", "x.to_global(sbp=B)"),
    "reshard": ("", _BOXING),
    "all_gather": ("", "x.to_global(sbp=B), a boxing"),
    "all_reduce": ("", "x.to_global(sbp=B), a boxing"),
    "all_to_all": ("", "x.to_global(sbp=S(1)), a boxing"),
    "reduce_scatter": ("", "x.to_global(sbp=S(0)), a boxing"),
}

# Name in the package -> (library that has the name, or "", what to write here).
PACKAGE_HINTS: dict[str, tuple[str, str]] = {
    "DTensor": ("DTensor", "consistent.GlobalTensor"),
    "DeviceMesh": ("DTensor", _MESH),
    "init_device_mesh": ("DTensor", _MESH),
    "Shard": ("DTensor", "consistent.S"),
    "Replicate": ("DTensor", "consistent.B"),
    "Partial": ("DTensor", "consistent.P"),
    "distribute_tensor": ("DTensor", "consistent.distribute(tensor, placement, sbp)"),
    "distribute_module": ("DTensor", "consistent.parallelize(model, placement, plan)"),
    "redistribute": ("DTensor", f"x.to_global(placement, sbp), {_SBPS}"),
    "parallelize_module": ("DTensor", _PLAN),
    "ColwiseParallel": ("DTensor", _PLAN),
    "RowwiseParallel": ("DTensor", _PLAN),
    "SequenceParallel": ("DTensor", 'consistent.parallelize(model, placement, "tensor+sequence")'),
    "loss_parallel": ("DTensor", "nothing: a loss of split logits is computed where they lie"),
    "local_map": ("DTensor", _MIRRORED_VIEW),
    "fully_shard": ("FSDP2", _ZERO3),
    "FullyShardedDataParallel": ("FSDP", _ZERO3),
    "FSDP": ("FSDP", _ZERO3),
    "MixedPrecisionPolicy": ("FSDP2", "model.bfloat16() and consistent.master_weights(optimizer)"),
    "summon_full_params": (
        "FSDP",
        "parameter.full(), or consistent.checkpoint.full_state_dict(model), on every rank",
    ),
    "DDP": ("DDP", 'consistent.parallelize(model, placement, "data")'),
    "DataParallel": ("DDP", 'consistent.parallelize(model, placement, "data")'),
    "DistributedSampler": ("DDP", _LOADER),
    "DataLoader": ("torch", _LOADER),
    "loader": ("", _LOADER),
    "save": ("", "consistent.checkpoint.save"),
    "load": ("", "consistent.checkpoint.load"),
    "full_state_dict": ("", "consistent.checkpoint.full_state_dict"),
    "Graph": ("OneFlow", "consistent.nn.Graph"),
    "rank": ("", _RANK),
    "get_rank": ("", _RANK),
    "world_size": ("", _SIZE),
    "get_world_size": ("", _SIZE),
    "init": ("", _NO_INIT),
    "initialize": ("", _NO_INIT),
    "init_process_group": ("", _NO_INIT),
    "all_reduce": ("", _COLLECTIVE),
    "all_gather": ("", _COLLECTIVE),
    "all_to_all": ("", _COLLECTIVE),
    "reduce_scatter": ("", _COLLECTIVE),
    "replicate": ("", "consistent.B"),
    "DistributedDataParallel": ("DDP", 'consistent.parallelize(model, placement, "data")'),
    "device_put": ("JAX", "consistent.distribute(tensor, placement, sbp), or x.to_global(...)"),
    "device_get": ("JAX", "x.full(), on every rank"),
    "with_sharding_constraint": ("JAX", "x.to_global(sbp=...)"),
    "shard_map": ("JAX", _MIRRORED_VIEW),
    "pmap": ("JAX", _MIRRORED_VIEW),
    "jit": ("JAX", "consistent.compile(step)"),
    "Mesh": ("JAX", _MESH),
    "make_mesh": ("JAX", _MESH),
    "NamedSharding": ("JAX", "a placement and an SBP for each of its axes"),
    "PartitionSpec": ("JAX", "an SBP for each axis of the placement: P('dp', None) is S(0)"),
    "make_array_from_process_local_data": (
        "JAX",
        "consistent.from_local(shard, placement, sbp)",
    ),
    "process_allgather": ("JAX", "x.full(), on every rank"),
    "split": ("OneFlow", "consistent.sbp.split(dim), or S(dim)"),
    "broadcast": ("OneFlow", "consistent.sbp.broadcast, or B"),
    "partial_sum": ("OneFlow", "consistent.sbp.partial_sum, or P"),
    "to_global": ("OneFlow", "x.to_global(placement, sbp), or from_local for plain shards"),
    "local_to_global": ("OneFlow", "consistent.from_local(shard, placement, sbp)"),
    "from_torch": ("OneFlow", "nothing: tensors are torch's"),
}


# Name in a subpackage or in ``consistent.sbp`` -> (library that has the name, or "", what to write
# here).
PART_HINTS: dict[str, tuple[str, str]] = {
    "DistributedSampler": ("DDP", _LOADER),
    "save_checkpoint": ("", "consistent.checkpoint.save"),
    "load_checkpoint": ("", "consistent.checkpoint.load"),
    "save_state_dict": ("", "consistent.checkpoint.save"),
    "load_state_dict": ("", "consistent.checkpoint.load"),
    "async_save": ("DTensor", "consistent.checkpoint.save(..., wait=False)"),
    "shard": ("", "consistent.sbp.split(dim), or S(dim)"),
    "Shard": ("DTensor", "consistent.S"),
    "replicate": ("", "consistent.sbp.broadcast, or B"),
    "Replicate": ("DTensor", "consistent.B"),
}

# Name of a plan elsewhere, in lower case and without "parallel" -> what to write here.
PLAN_HINTS: dict[str, str] = {
    "ddp": '"data"',
    "dp": '"data"',
    "replicate": '"data"',
    "distributeddata": '"data"',
    "fsdp": '"zero3"',
    "fsdp2": '"zero3"',
    "fullyshard": '"zero3"',
    "fullysharded": '"zero3"',
    "fullyshardeddata": '"zero3"',
    "hsdp": '{"dp": "data", "fsdp": "zero3"}, on a placement with these axes,',
    "tp": '"tensor"',
    "model": '"tensor"',
    "megatron": '"tensor"',
    "sp": '"tensor+sequence"',
    "sequence": '"tensor+sequence"',
    "tp+sp": '"tensor+sequence"',
    "ep": '"expert"',
    "moe": '"expert"',
    "transformers": '"hf"',
    "huggingface": '"hf"',
    "pp": "consistent.nn.pipeline(model, placements)",
    "pipeline": "consistent.nn.pipeline(model, placements)",
}


def hint(name: str, names: dict[str, tuple[str, str]]) -> str:
    """Return a hint for an error about an unknown name: whose name it is, and what to write here.

    ``DTensor`` gives ". It is a name of DTensor's; here it is consistent.GlobalTensor.". Empty if
    ``name`` is not in ``names``, which maps names of other libraries to (library, what to write).
    """
    if name not in names:
        return ""
    library, replacement = names[name]
    subject = f"It is a name of {library}'s; here" if library else "Here"
    return f". {subject} it is {replacement}."


def module_getattr(
    module: str, names: dict[str, tuple[str, str]], known: Iterable[str]
) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module, which raises ``missing_name_error`` for every name.

    So ``consistent.sbp.Shard`` raises an error with a hint. It is for modules without lazily
    imported names.
    """

    def __getattr__(name: str) -> Any:
        raise missing_name_error(module, name, names, known)

    return __getattr__


def missing_name_error(
    module: str, name: str, names: dict[str, tuple[str, str]], known: Iterable[str]
) -> AttributeError | ImportError:
    """Return the error for a name that ``module`` lacks, with a hint what to write instead.

    The module's ``__getattr__`` raises it. It is an ImportError if ``from module import name`` is
    running: Python would replace an AttributeError there by its own text, without the hint.

    Args:
        module: name of the module.
        name: the name that it lacks.
        names: names of other libraries -> (library, what to write here).
        known: the names that the module has.
    """
    hint_text = hint(name, names) or _similar_name_hint(module, name, known)
    # Frame 1 is the module's __getattr__. importlib needs an AttributeError for a submodule, which
    # it then imports.
    importing = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if hint_text and importing and find_spec(f"{module}.{name}") is None:
        return ImportError(f"cannot import name {name!r} from {module!r}{hint_text}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint_text}", name=name)


def _similar_name_hint(module: str, name: str, known: Iterable[str]) -> str:
    """Return the end of an error for an unknown name: a known name that is near it, or torch's own.

    The text is empty if there is neither.
    """
    if name.startswith("_"):  # Python and tools probe for such names and expect a miss
        return ""
    text = suggestion(name, known, 0.75)
    if text:
        return f".{text}"
    torch_module = "torch" + module.removeprefix("consistent")
    is_torch_name = callable(getattr(sys.modules.get(torch_module), name, None))
    return f". It is torch's own: {torch_module}.{name}." if is_torch_name else ""
