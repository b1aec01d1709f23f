"""Names that other libraries have for what is called otherwise here, for messages that say so.

Nothing answers to these names: code that asks ``hasattr(x, "full_tensor")`` to find a DTensor gets
no, as before.
"""

from __future__ import annotations

_SBPS = "with S(d) for Shard(d), B for Replicate() and P for Partial()"
_MESH = 'consistent.placement("cpu", ranks=[[0, 1], [2, 3]], axes=("dp", "tp"))'
_PLAN = 'consistent.parallelize(model, placement, "tensor"), or patterns of names -> SBP'
_SHARDED = 'consistent.parallelize(model, placement, "zero3")'
_HERE = "mirrored's view: x.to_mirrored(), ops on its elements, and .to_global(sbp) back"

# Attribute of a tensor -> (whose name it is, what to call here).
OF_TENSORS: dict[str, tuple[str, str]] = {
    "redistribute": ("DTensor", f"x.to_global(placement, sbp=S(0)), {_SBPS}"),
    "full_tensor": ("DTensor", "x.full(), on every rank"),
    "device_mesh": ("DTensor", "x.placement"),
    "placements": ("DTensor", f"x.sbp, {_SBPS}"),
    "from_local": ("DTensor", "consistent.from_local(shard, placement, sbp)"),
    "_local_tensor": ("DTensor", "x.to_local()"),
    "sharding": ("JAX", "x.placement and x.sbp"),
    "addressable_shards": ("JAX", "x.to_local(), this rank's shard, or x.to_mirrored()"),
    "addressable_data": ("JAX", "x.to_local()"),
    "global_shards": ("JAX", "x.to_local() on each rank"),
    "is_fully_addressable": ("JAX", "x.placement.size == 1"),
    "is_fully_replicated": ("JAX", "all(entry.is_broadcast for entry in x.sbp)"),
    "to_consistent": ("OneFlow", "x.to_global(placement, sbp)"),
    "local_to_global": ("OneFlow", "consistent.from_local(shard, placement, sbp)"),
    "global_to_global": ("OneFlow", "x.to_global(placement, sbp)"),
    "is_consistent": ("OneFlow", "x.is_global"),
    "is_local": ("OneFlow", "not x.is_global"),
}

# Name in the package -> the same.
OF_PACKAGE: dict[str, tuple[str, str]] = {
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
    "local_map": ("DTensor", _HERE),
    "fully_shard": ("FSDP2", _SHARDED),
    "FullyShardedDataParallel": ("FSDP", _SHARDED),
    "DistributedDataParallel": ("DDP", 'consistent.parallelize(model, placement, "data")'),
    "device_put": ("JAX", "consistent.distribute(tensor, placement, sbp), or x.to_global(...)"),
    "device_get": ("JAX", "x.full(), on every rank"),
    "with_sharding_constraint": ("JAX", "x.to_global(sbp=...)"),
    "shard_map": ("JAX", _HERE),
    "pmap": ("JAX", _HERE),
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


def hint(name: str, names: dict[str, tuple[str, str]]) -> str:
    """What to append to "there is no such name": whose it is and what to write here, if known."""
    if name not in names:
        return ""
    whose, instead = names[name]
    return f". It is a name of {whose}'s; here it is {instead}."
