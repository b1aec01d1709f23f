"""``nn.Graph``: one training or inference step as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..compiled import CompiledStep
from ..dispatch.plans.shards import is_global
from ..nn.recompute import recomputing
from ..pipeline.stage import Stage, check_stages, set_stage, stage_of
from ..spec import Placement
from . import zero
from .accumulate import run_micro_batches
from .backward_calls import intercept_backward
from .config import GraphConfig
from .optimizers import Optimizers
from .pipelined import Pipelined


class Graph:
    """One training or inference step, defined by ``build`` and run by calling the graph.

    ```
    class Train(nn.Graph):
        def __init__(self, model, optimizer):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)
            self.config.set_gradient_accumulation_steps(4)

        def build(self, x, y):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

    loss = Train(model, optimizer)(x, y)
    ```

    If optimizers were added, a call sets gradients to zero, runs ``build``, which calls
    ``backward()``, then steps the optimizers and their schedules. Every rank calls the graph with
    the same batch, or with global tensors. ``config`` (a ``GraphConfig``) sets autocast,
    micro-batches, ZeRO, the schedule and compilation.

    With pipeline stages (``module.to(nn.graph.GraphModule).set_stage(...)``, or ``Graph.stage``)
    and several micro-batches, the stages work on several micro-batches at once, in the order of
    ``config.schedule``.
    """

    def __init__(self) -> None:
        self.config = GraphConfig()
        self._optimizers = Optimizers()
        self._pipeline: Any = None
        self._compiled: CompiledStep | None = None

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Compute one step; each subclass defines this method, and calls of the graph run it.

        It gets the arguments of the call, and calls ``backward()`` on its loss if it trains.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.build: it is not written. Define build(self, ...), which "
            "computes what a call of the graph returns."
        )

    def add_optimizer(
        self,
        optim: torch.optim.Optimizer,
        *,
        lr_sch: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        """Make each call of the graph a training step, which steps ``optim`` after ``build``.

        ``lr_sch``, a learning rate schedule of the optimizer, is stepped once in each call, too.

        Raises:
            TypeError: ``optim`` is not an optimizer.
        """
        self._optimizers.add(optim, lr_sch)

    def set_grad_scaler(self, grad_scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses by ``grad_scaler``, and skip steps whose gradients overflow.

        With None, losses are not scaled, as is the default.
        """
        self._optimizers.scaler = grad_scaler

    @staticmethod
    def stage(module: torch.nn.Module, index: int, placement: Placement) -> None:
        """Assign ``module`` to pipeline stage ``index``, which runs on ``placement``.

        This is the same as ``module.to(nn.graph.GraphModule).set_stage(...)``.

        Raises:
            ValueError: ``index`` is negative.
            RuntimeError: the placement names ranks that the world does not have.
        """
        set_stage(module, index, placement)

    @property
    def trains(self) -> bool:
        """True if an optimizer was added, so that a call trains."""
        return bool(self._optimizers)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers, in the order in which they were added."""
        return self._optimizers.list()

    # -- its modules -------------------------------------------------------------------------------

    def modules(self) -> Iterator[torch.nn.Module]:
        """Iterate over the modules that are attributes of the graph, and over their submodules.

        Each module is returned once.
        """
        seen: set[int] = set()
        for value in vars(self).values():
            if isinstance(value, torch.nn.Module):
                for module in value.modules():
                    if id(module) not in seen:
                        seen.add(id(module))
                        yield module

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the modules that are attributes of the graph, without optimizers.

        Keys begin with the attribute's name, such as ``model.layers.0.weight``.
        """
        modules = {n: m for n, m in vars(self).items() if isinstance(m, torch.nn.Module)}
        return {f"{n}.{key}": x for n, m in modules.items() for key, x in m.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned into the modules of the graph.

        Raises:
            RuntimeError: a name is missing, or a name is not known.
        """
        modules = {n: m for n, m in vars(self).items() if isinstance(m, torch.nn.Module)}
        unknown = [key for key in state if key.partition(".")[0] not in modules]
        if unknown:
            raise RuntimeError(
                f"{type(self).__name__}.load_state_dict: {unknown[0]!r} belongs to none of its "
                f"modules, which are {', '.join(modules) or 'none'}."
            )
        for name, module in modules.items():
            dot = f"{name}."
            module.load_state_dict(
                {key.removeprefix(dot): x for key, x in state.items() if key.startswith(dot)}
            )

    def stages(self) -> list[Stage]:
        """Return the pipeline stages of the graph's modules, ordered by index."""
        module_stages = [stage for m in self.modules() if (stage := stage_of(m)) is not None]
        placements = check_stages(type(self).__name__, module_stages)
        return [Stage(index, placement) for index, placement in placements.items()]

    # -- a step ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self.stages()
        zero.shard_states(self, self.config.zero)
        if not self.config.is_compiled:
            return self._step(*args, **kwargs)
        if len(stages) > 1:
            raise ValueError(
                f"{type(self).__name__}: it has {len(stages)} stages, and config.backend is "
                f"{self.config.backend!r}.\n  A compiled step is one program on all ranks, and "
                "stages run different ones.\n  Leave enable_compile() out."
            )
        if self._compiled is None or self._compiled.options != self.config.options:
            self._compiled = CompiledStep(self._step, self.config.options)
        return self._compiled(*args, **kwargs)

    def show(self, path: str | Path | None = None) -> str:
        """Return the recorded step as text.

        For a compiled graph, the text lists the ops with their layouts, what is sent, and the lines
        of ``build`` that these come from. For a graph with pipeline stages and micro-batches, it
        shows the schedule and what each stage does. With ``path``, the same is also written as a
        self-contained HTML page.

        Raises:
            RuntimeError: nothing was recorded yet, or the graph is configured to record nothing.
            ValueError: ``path`` does not end in .html.
        """
        if self._compiled is not None and self._compiled.programs:
            return self._compiled.show(path)
        if self._pipeline is not None:
            return self._pipeline.show(path)
        raise RuntimeError(
            f"{type(self).__name__}.show: no step was recorded yet.\n"
            "  Call config.enable_compile(), then the graph twice; or set stages and "
            "config.set_gradient_accumulation_steps(), then call it once."
        )

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Zero the gradients, run ``build`` with its backward, and step the optimizers."""
        stages = self.stages()
        self._optimizers.begin()
        with ExitStack() as stack:
            stack.enter_context(self._autocast())
            stack.enter_context(recomputing(self.modules()))
            result = self._runner(stages)(args, kwargs)
        self._optimizers.step(type(self).__name__)
        return result

    def _runner(self, stages: list[Stage]) -> Callable[[tuple, dict[str, Any]], Any]:
        """Return the function (args, kwargs) -> result that runs ``build`` on a whole batch.

        It runs micro-batches on pipeline stages, or one after another, or the batch in one piece,
        as ``config`` and ``stages`` say. The backward that ``build`` calls is included.
        """
        if self.config.micro_batches > 1 and len(stages) > 1:
            if self._pipeline is None or not self._pipeline.fits(stages, self.config):
                self._pipeline = Pipelined(self, stages, self.config)
            return self._pipeline.run
        if self.config.micro_batches > 1:
            return lambda args, kwargs: run_micro_batches(
                type(self).__name__,
                self.build,
                args,
                kwargs,
                self.config.micro_batches,
                self._scale,
            )
        return self._run_whole_batch

    def _run_whole_batch(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``build`` on the batch in one piece, and scale its loss if there is a scaler."""
        if self._optimizers.scaler is None:
            return self.build(*args, **kwargs)
        with intercept_backward(lambda loss, run: run(self._scale(loss))):
            return self.build(*args, **kwargs)

    def _scale(self, loss: Any) -> Any:
        scaler = self._optimizers.scaler
        return loss if scaler is None else scaler.scale(loss)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.amp is None:
            return nullcontext()
        return torch.autocast(self._device_type(), dtype=self.config.amp)

    def _device_type(self) -> str:
        for module in self.modules():
            for x in module.parameters(recurse=False):
                return x.placement.type if is_global(x) else x.device.type  # type: ignore[attr-defined]
        return "cpu"
