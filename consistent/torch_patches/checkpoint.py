"""``torch.utils.checkpoint`` compares what autograd saves with what it saves again."""

from __future__ import annotations

import torch.utils.checkpoint as checkpointing

from ..dispatch.plans.shards import is_global, plain


def install() -> None:
    """A saved tensor is sometimes seen as global and sometimes as its shard, depending on how the
    op was run; both are compared as the shard."""
    compare = checkpointing._allowed_determinism_checks_to_fns
    mode = checkpointing._DEFAULT_DETERMINISM_MODE
    metadata = compare[mode]
    compare[mode] = lambda x: metadata(plain(x) if is_global(x) else x)
