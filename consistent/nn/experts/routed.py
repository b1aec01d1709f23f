"""Run a module of experts on the token rows that all ranks send to this one, as plain tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mirrored.transports.default import current

from ...dispatch.planning.without_modes import without_modes
from ...dispatch.plans.shards import attach, plain
from ...movement.world import excluding_others
from ...spec import B, TensorSpec
from .exchange import Owners, Routes
from .kinds import COUNT_ATTRIBUTES
from .replaced import attributes_replaced


@dataclass(frozen=True)
class Routed(ABC):
    """Function that sends this rank's tokens to the experts of all ranks, and adds their outputs.

    It maps (tokens, choices, weights, this rank's tensors of the experts) to the weighted outputs
    for this rank's tokens; all are plain tensors. Subclasses say what choices are (``choices``) and
    how experts run (``run_experts``). Its ``repr`` is the same on all ranks, and identifies it in a
    recorded program.

    Args:
        owners: the assignment of experts to ranks.
    """

    owners: Owners

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype in which the outputs of a token's experts are added.

        None for that of the outputs.
        """
        return None

    def __call__(self, x: Tensor, choices: Tensor, weights: Tensor, *tensors: Tensor) -> Tensor:
        index, weights = self.choices(choices, weights)
        routes = Routes(index, self.owners)
        rows, expert = routes.send(x.reshape(-1, x.shape[-1]))
        out = routes.send_back(self.run_experts(rows, expert, tensors), weights, self.dtype)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @abstractmethod
    def choices(self, choices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return (index, weights), each [tokens, k]: the experts of each token, and their weights.

        Args:
            choices: the experts of the tokens, as the module has them: indices, or a mask.
            weights: the weights that belong to ``choices``.
        """

    @abstractmethod
    def run_experts(self, rows: Tensor, expert: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return the outputs of this rank's experts for ``rows``, one row for each.

        Args:
            rows: [rows, features], which have arrived from all ranks.
            expert: [rows], on the CPU: the index of each row's expert among those of this rank.
            tensors: the tensors of the experts.
        """


class Forward(Protocol):
    """The replaced forward of a module of experts, as ``RoutedStacks`` uses it.

    ``number`` identifies the module in a recorded program; it is the same on all ranks.
    """

    module: nn.Module
    number: int

    def original_forward(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, repr=False)
class RoutedStacks(Routed):
    """Routing through a module of experts whose tensors are stacks, with an entry for each expert.

    Args:
        forward: the replaced forward of the module, whose ``original_forward`` runs the module's
            code.
        keys: the names of its stacks.
        specs: the specs of its stacks on the ranks among which each expert is split; empty if
            experts are not split.
    """

    forward: Forward
    keys: tuple[str, ...]
    specs: tuple[TensorSpec, ...]

    def choices(self, choices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return choices.reshape(-1, choices.shape[-1]), weights.reshape(-1, weights.shape[-1])

    def run_experts(self, rows: Tensor, expert: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        # A rank that receives no rows runs a row of zeros, so that its weights are part of the
        # graph and get a gradient of zeros.
        empty = rows.shape[0] == 0
        if empty:
            rows, expert = pad(rows, (0, 0, 0, 1)), pad(expert, (0, 1))
        one_each = expert[:, None].to(rows.device)
        outputs = self._run_module([rows, one_each, torch.ones_like(rows[:, :1])], tensors)
        check_rows(outputs, rows, self.forward.module)
        return outputs[:0] if empty else outputs

    def _run_module(self, inputs: list[Tensor], stacks: Sequence[Tensor]) -> Any:
        """Run the module's own forward as if there were no experts but this rank's.

        Args:
            inputs: the rows that have arrived, the expert of each, and weights of 1.
            stacks: this rank's part of each stack.
        """
        if not self.specs:
            with attributes_replaced(self.forward.module, self._attributes_of_own_experts(stacks)):
                return self.forward.original_forward(*inputs)
        placement = self.specs[0].placement
        replicated = (B,) * placement.ndim
        global_inputs = [
            attach(x, TensorSpec.of(placement, replicated, x.shape, x.dtype)) for x in inputs
        ]
        attributes = self._attributes_of_own_experts([*map(attach, stacks, self.specs)])
        with attributes_replaced(self.forward.module, attributes), excluding_others():
            return (
                self.forward.original_forward(*global_inputs).to_global(sbp=replicated).to_local()
            )

    def _attributes_of_own_experts(self, stacks: Sequence[Tensor]) -> dict[str, Any]:
        """Return the attributes to set so that the module sees only this rank's experts.

        These are the stacks, and the attributes that hold the number of experts.
        """
        numbers = [
            key
            for key in COUNT_ATTRIBUTES
            if isinstance(self.forward.module.__dict__.get(key), int)
        ]
        return dict(zip(self.keys, stacks, strict=True)) | dict.fromkeys(numbers, len(stacks[0]))

    def __repr__(self) -> str:
        return f"experts {self.forward.number} {type(self.forward.module).__name__} {self.owners}"


def check_rows(outputs: Any, rows: Tensor, experts: nn.Module) -> None:
    """Raise ``TypeError`` unless ``outputs`` of experts have a row for each of ``rows``."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != rows.shape[0]:
        raise TypeError(
            f"experts: {type(experts).__name__} made {short(outputs)} of {rows.shape[0]} rows, and "
            "experts to which tokens are sent give a row for each. Lay its weights out in another "
            "way than S(0)."
        )


# -- in a step that is recorded --------------------------------------------------------------------


def run_routed(run: Routed, local: list[Tensor], spec: TensorSpec) -> Any:
    """Run ``run`` on ``local``, and return the result as a global tensor laid out like the tokens.

    In a recorded step all of ``run`` is one message of the transport, since sizes that depend on
    values must not be visible outside a message. The backward is another message, which runs the
    forward again. Experts that another axis splits communicate inside it, so all ranks of the
    placement take part.

    Args:
        run: the routing through the experts.
        local: its arguments on this rank.
        spec: the spec of the tokens.
    """
    out = _InOneMessage.apply(run, *local) if current().records else run(*local)
    shape = (*spec.shape[:-1], out.shape[-1])
    return attach(out, TensorSpec.of(spec.placement, spec.sbp, shape, out.dtype))


class _InOneMessage(torch.autograd.Function):
    """Autograd function whose forward and backward are one message each in a recorded step."""

    @staticmethod
    def forward(ctx: Any, run: Routed, *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return _run_as_message(_Forward(run), list(tensors))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, index, *others = ctx.saved_tensors
        grad_of_x, *other_grads = _run_as_message(_Backward(ctx.run), [grad, x, index, *others])
        return None, grad_of_x, None, *other_grads


def _run_as_message(run: _Forward | _Backward, tensors: list[Tensor]) -> list[Tensor]:
    """Run ``run`` on ``tensors`` as one message of the transport, and return its results."""
    return current().as_one(run, [x.detach() for x in tensors], run.run.owners.told)


@dataclass(frozen=True)
class _Forward:
    """Forward of ``_InOneMessage`` as a message: [tokens, choices, weights, ...] -> [output]."""

    run: Routed

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        with without_modes(), torch.no_grad():
            return [self.run(*xs)]


@dataclass(frozen=True)
class _Backward:
    """Backward of ``_InOneMessage``, as a message that runs the forward again.

    Maps (gradient of the output, tokens, choices, weights, tensors) to the gradients of tokens,
    weights and tensors; choices (expert indices or masks) have none.
    """

    run: Routed

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        grad, x, index, *others = xs
        with without_modes():  # a recorded program runs below autograd, which is needed here
            x, *others = (each.detach().requires_grad_() for each in (x, *others))
            out = self.run(x, index, *others)
            # Stacks of weights that another axis splits have become global tensors, and so have
            # their gradients.
            return list(map(plain, torch.autograd.grad(out, (x, *others), grad)))
