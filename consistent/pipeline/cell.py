"""Run one stage on one micro-batch: forward, backward, or backward in two halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..dispatch.plans.shards import attach, is_global, plain
from ..forms.random import generator
from ..graph.program import LocalDevice, ProgramLine, Ref, StagesProgram
from ..spec.nested import map_instances, tensors_in
from .part import ProgramPart
from .split_backward import SplitBackward


class Cell:
    """One stage's run of one micro-batch, with the tensors kept between forward and backward.

    A schedule calls ``forward``, and later ``backward``, or its halves ``backward_of_inputs`` and
    ``backward_of_weights``. Gradients of parameters are added to their ``.grad``.

    Attributes:
        results: value index -> the detached value, of the values that the program returns and this
            stage computes.
    """

    def __init__(self, program: StagesProgram, part: ProgramPart, device: torch.device) -> None:
        self._program, self._part, self._device = program, part, device
        self._leaves: dict[int, torch.Tensor] = {}  # index of the move that enters -> its leaf
        self._roots: dict[int, Any] = {}  # index of the value that leaves -> the value
        self._losses: list[Any] = []
        self._split: SplitBackward | None = None
        self.results: dict[int, Any] = {}

    # -- forward -----------------------------------------------------------------------------------

    def forward(
        self,
        inputs: Sequence[Any],
        received_shards: Mapping[int, torch.Tensor],
        draws: int,
        scale: Callable[[Any], Any] | None,
    ) -> dict[int, torch.Tensor]:
        """Run the lines of the stage's part of the program.

        Args:
            inputs: the tensors among the arguments of the micro-batch.
            received_shards: move index -> this rank's shard of the activation that enters.
            draws: the count of random ops when the micro-batch's program begins.
            scale: is applied to each loss; None if no backward follows.

        Returns:
            value index -> this rank's detached shard, of the values that leave for other stages.
        """
        env: dict[int, Any] = dict(zip(self._program.inputs, inputs, strict=True))
        for move in self._part.entering:
            env[move.out] = self._received_value(
                move.index, move.out, received_shards[move.index], scale is not None
            )
        for line in self._part.lines:
            self.run_line(line, env, draws)
        leaving_shards = {}
        for index in self._part.leaving:
            x = self._in_recorded_layout(self._value(env, index), index)
            leaving_shards[index] = plain(x).detach()
            if scale is not None and x.requires_grad:
                self._roots[index] = x
        if scale is not None:
            self._losses = [scale(self._value(env, index)) for index in self._part.losses]
        self.results = {i: self._value(env, i).detach() for i in self._part.results}
        return leaving_shards

    def _received_value(self, move: int, index: int, local: torch.Tensor, tracked: bool) -> Any:
        """Return a received value, whose shard is ``local``, as a global tensor.

        If gradients are ``tracked``, the tensor depends on a new leaf, at which the gradient to
        send back is collected. ``move`` is the number of the transfer between stages, ``index``
        that of the value in the program.
        """
        spec = self._program.spec(index)
        if not (tracked and self._program.values[index].requires_grad):
            return attach(local.detach(), spec)
        leaf = self._leaves[move] = local.detach().requires_grad_()
        return attach(_ReceivedShard.apply(leaf, (local.detach(),)), spec)

    def _value(self, env: dict[int, Any], index: int) -> Any:
        """Return the value number ``index``: from ``env`` if computed, else read (a parameter)."""
        if index in env:
            return env[index]
        read = self._program.values[index].read
        assert read is not None, f"%{index} of {self._program.name} is not there"
        return read()

    def run_line(self, line: ProgramLine, env: dict[int, Any], draws: int) -> None:
        """Run one line and store its results in ``env``, the values computed so far."""
        if line.draws[1]:
            # A schedule interleaves micro-batches. With the count set for each line, random ops
            # draw the numbers that they would draw if one micro-batch ran after the other.
            generator.set_draw_count(torch.default_generator, draws + line.draws[0])
        outputs = tensors_in(self.call_line(line, env))
        if len(outputs) != len(line.outs):
            raise RuntimeError(
                f"{line.name}, at {line.where}, gives {len(outputs)} tensors, and gave "
                f"{len(line.outs)} when the program was recorded.\n  Stages are connected as "
                "recorded.\n  Let a module give the same structure for each micro-batch."
            )
        env.update(zip(line.outs, outputs, strict=True))

    def call_line(self, line: ProgramLine, env: dict[int, Any]) -> Any:
        """Return the result of one line, with its arguments taken from ``env``."""
        arguments = map_instances(
            (line.args, line.kwargs), Ref, lambda ref: self._value(env, ref.index)
        )
        args, kwargs = map_instances(arguments, LocalDevice, lambda _: self._device)
        if line.mode is None:
            return line.target(*args, **kwargs)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(line.mode[0] and torch.is_grad_enabled()))
            for kind, enabled, dtype in line.mode[1]:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            return line.target(*args, **kwargs)

    def _in_recorded_layout(self, x: Any, index: int) -> Any:
        """Return the value ``x``, number ``index``, in the recorded layout, which receivers expect.

        Raises:
            RuntimeError: ``x`` is plain, or its shape or dtype is not the recorded one.
        """
        spec, value = self._program.spec(index), self._program.values[index]
        if not is_global(x) or x._spec.shape != spec.shape or x._spec.dtype != spec.dtype:
            actual = x._spec if is_global(x) else f"a plain tensor of shape {tuple(x.shape)}"
            receivers = ", ".join(f"stage {m.dst}" for m in self._part.leaving[index])
            raise RuntimeError(
                f"stage {value.stage} gives {actual} to {receivers}, which expects {spec}, "
                "as recorded.\n"
                "  Shapes and dtypes between stages depend on those of the batch alone.\n"
                "  Pad to one shape, or cut the model elsewhere."
            )
        return x if x._spec is spec else x.to_global(sbp=spec.sbp)

    # -- backward ----------------------------------------------------------------------------------

    @property
    def values_needing_gradients(self) -> list[int]:
        """Return the numbers of the values whose gradients ``backward`` needs.

        They are the values that were sent to other stages and require grad.
        """
        return list(self._roots)

    def backward(
        self, grads: Mapping[int, torch.Tensor], send_gradient: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Run the whole backward, and send each input's gradient once it is ready.

        Hooks on the leaves call ``send_gradient`` before the autograd engine waits for the
        reductions of parameter gradients, so that the previous stage can start earlier.

        Args:
            grads: for each value in ``values_needing_gradients``, the shard of its gradient, in the
                dual of its spec.
            send_gradient: is called with (move index, shard of the gradient) for each input; zeros
                where backward does not reach an input.
        """
        roots, seeds = self._roots_and_seeds(grads)
        unreached = dict(self._leaves)

        def give_gradient(leaf: torch.Tensor, move: int) -> None:
            assert leaf.grad is not None
            send_gradient(move, leaf.grad.detach())
            del unreached[move]

        for move, leaf in self._leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(give_gradient, move=move))
        if roots:
            torch.autograd.backward(roots, seeds)
        for move, leaf in unreached.items():
            send_gradient(move, torch.zeros_like(leaf))
        self._leaves = {}

    def backward_of_inputs(self, grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the first half of backward, which computes only the gradients of the stage's inputs.

        ``grads`` is as for ``backward``.

        Returns:
            move index -> the shard of the gradient; zeros where backward does not reach an input.
        """
        roots, seeds = self._roots_and_seeds(grads)
        self._split = SplitBackward(roots, seeds, list(self._leaves.values()))
        input_grads = {}
        for (move, leaf), grad in zip(
            self._leaves.items(), self._split.backward_to_inputs(), strict=True
        ):
            input_grads[move] = torch.zeros_like(leaf) if grad is None else grad.detach()
        return input_grads

    def backward_of_weights(self) -> None:
        """Run the second half of backward, which adds up the gradients of the parameters.

        It must follow ``backward_of_inputs``.
        """
        assert self._split is not None
        self._split.backward_to_parameters()
        self._split = None

    def _roots_and_seeds(self, grads: Mapping[int, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """Return (tensors that backward starts from, their gradients; None for a loss)."""
        roots: list[Any] = [loss for loss in self._losses if loss.requires_grad]
        seeds: list[Any] = [None for _ in roots]
        for index, x in self._roots.items():
            roots.append(x)
            seeds.append(attach(grads[index], x._spec.dual))
        self._losses, self._roots = [], {}
        return roots, seeds


class _ReceivedShard(torch.autograd.Function):
    """Autograd function that returns the received shard as a non-leaf tensor above a leaf.

    The leaf gets the gradient of the input, to be sent back. The model may write in place into the
    non-leaf, which torch forbids for a leaf.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, received: tuple[torch.Tensor]) -> torch.Tensor:
        # Not a view of the leaf to autograd: torch forbids in-place writes to a view of a leaf.
        return received[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None
