"""DataParallel: a module replicated on every rank, with gradients averaged in backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .transports.default import current


class DataParallel(DistributedDataParallel):
    """Module replicated on every rank; call it with this rank's part of the batch.

    This is torch's own DistributedDataParallel, which sends its buckets of gradients while backward
    still computes. Gradients are means over ranks, so with parts of equal size (as ``scatter``
    gives) a mean loss has the gradients of the mean over the whole batch. Parameters and buffers
    start with the values of rank 0.

    Args:
        module: a module whose parameters are plain and on one device.
        options: options of DistributedDataParallel, such as ``find_unused_parameters``.

    Raises:
        TypeError: a parameter is not a plain one.
        RuntimeError: there is no process group, and no launcher that says how to make one.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        for name, parameter in module.named_parameters():
            if type(parameter) is not torch.nn.Parameter:
                raise TypeError(
                    f"DataParallel: parameter {name!r} is a {type(parameter).__name__}.\n"
                    "  Only plain parameters have a copy on every rank; the gradients of global "
                    "ones are synchronised where they are.\n"
                    "  Call the module itself on a batch that is split(0)."
                )
        size = current().size  # under torchrun this starts torch.distributed
        if not dist.is_initialized():
            raise RuntimeError(
                f"DataParallel: torch.distributed is not initialised, and the world has {size} "
                "rank.\n"
                "  Copies are kept equal by a process group.\n"
                "  Start the program with torchrun, or initialise it: "
                'torch.distributed.init_process_group("gloo").'
            )
        super().__init__(module, **options)
        self._keep_group()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keep_group()

    def _keep_group(self) -> None:
        """Keep the process group alive until DistributedDataParallel's reducer is gone.

        This avoids a deadlock. A group that was destroyed ends its threads when its last reference
        goes. If the reducer holds that reference, torch joins the threads while it holds the GIL,
        and a thread that releases a tensor waits for the GIL. If Python holds the last reference,
        torch releases the GIL before it drops the group.
        """
        for holder in (self.reducer, self.logger):
            # The finalizer's argument holds the group; it is dropped only after `holder` is
            # destroyed.
            weakref.finalize(holder, lambda group: None, self.process_group).atexit = False
