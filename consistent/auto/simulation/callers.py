"""Who calls an op: the program in forward, autograd's engine, or an optimizer.

```
forward    F.linear(x, w)                   Python, and autograd records a node
backward   AddmmBackward0 -> mm             autograd's engine, in C++
update     p.addcdiv_(m, v), bucket.view()  no node is recorded or run
```
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...cost_model.model import Caller
from ...nn.sharded.step import install_step_hooks
from ...spec.tracer import Tracer


class Callers:
    """Observer of a program that reports whether forward, backward or an optimizer calls an op.

    The caller decides how much Python time the op takes.
    """

    def __init__(self) -> None:
        self._backward_depth = 0  # passes of the engine that have begun: they may be nested
        self._in_update = False
        self._records_graph = True  # whether the module that was called last records a graph

    def op_caller(self) -> Caller:
        """Return who calls the op that runs now: "forward", "backward" or "update"."""
        if torch.is_grad_enabled():  # also where a checkpoint runs forward again in backward
            return "forward"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        # Without a graph: inference, or what the library and optimizers do to shards.
        return "update" if self._records_graph or not self._in_forward else "forward"

    def message_caller(self) -> Caller:
        """Return who sends a message now: "forward", "backward" or "update".

        In forward, boxing sends with grad mode off, so ``op_caller`` would take it for an update.
        """
        return "forward" if self._in_forward else self.op_caller()

    @property
    def _in_forward(self) -> bool:
        return not (self._in_update or self._backward_depth)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the program inside the ``with`` block."""

        def end_update(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._in_update = False

        # The library's hooks run first: what they do after a step belongs to it.
        install_step_hooks()
        hooks = [
            register_optimizer_step_post_hook(end_update),
            register_module_forward_pre_hook(self._before_forward),
        ]
        try:
            with Tracer(
                on_backward=self._on_backward, on_optimizer_step=self._on_optimizer_step
            ).tracing():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_forward(self, module: Any, args: Any) -> None:
        self._records_graph = torch.is_grad_enabled()

    def _on_backward(self, begins: bool) -> None:
        self._backward_depth += 1 if begins else -1

    def _on_optimizer_step(self, optimizer: Any) -> None:
        self._in_update = True
