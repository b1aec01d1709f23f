"""A change for ``save_on_cpu``, so that it keeps ``meta`` tensors as they are.

It copies saved tensors to the CPU. On ranks outside a placement these are ``meta`` shards, which
contain nothing to copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from ..dispatch.plans.shards import plain


def install() -> None:
    """Patch ``torch.autograd.graph.save_on_cpu``, so that it keeps ``meta`` shards as they are."""
    original: Callable[..., None] = save_on_cpu.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pack, unpack = self.pack_hook, self.unpack_hook
        self.pack_hook = lambda x: x if plain(x).is_meta else pack(x)
        # torch's hook packs a tensor into a tuple; a bare tensor is one that was not packed.
        self.unpack_hook = lambda packed: (
            packed if isinstance(packed, torch.Tensor) else unpack(packed)
        )

    save_on_cpu.__init__ = init  # type: ignore[method-assign]
