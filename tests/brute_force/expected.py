"""What torch makes of a call on the whole: values, tensors that it writes to, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from consistent.forms.random import generator
from consistent.spec import NdSbp
from tests.brute_force.called import Called, Grid, replaced
from tests.reference import Tensors, cut
from tests.rounding import few_digits

_TOLERANCE = {
    torch.float32: 5e-5,  # addends are several times as large as what they add up to
    torch.complex64: 1e-5,
    torch.float16: 2e-2,
    torch.complex32: 2e-2,
    torch.bfloat16: 2e-1,
}

# Random ops draw from this state, on the whole and on every rank.
RANDOM = generator.RngState(7, 3)


def _normal(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    made = torch.randn(like.shape, dtype=like.dtype, generator=random)
    return few_digits(made) if like.dtype == torch.float32 else made


def addends(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Random numbers of the shape and dtype of ``like``, some times as large as 1."""
    if like.is_floating_point() or like.is_complex():
        return 3 * _normal(like, random)
    return torch.randint(-9, 9, like.shape, generator=random).to(like.dtype)


def fixed(x: torch.Tensor) -> torch.Tensor:
    """`x`, marked as an argument that torch computes no gradient for."""
    x.takes_no_gradient = True  # type: ignore[attr-defined]
    return x


class Expected(Called):
    """A call, and what comes out of it; `reference` computes that where `func` itself does not.
    Without `gradients` its values alone are compared."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        ranks: Grid = 3,
        reference: Callable[..., Any] | None = None,
        gradients: bool = True,
    ) -> None:
        super().__init__(func, args, kwargs, ranks)
        self.random = torch.Generator().manual_seed(0)
        self._scattered: dict[tuple[int, NdSbp], tuple[torch.Tensor, Tensors]] = {}
        dtypes = {t.dtype for t in self.tensors} | {out.dtype for out in self.call.outs}
        self.tolerance = max(_TOLERANCE.get(dtype, 1e-7) for dtype in dtypes)
        self._compute_values(reference or self.known.run)
        try:
            if gradients:
                self._differentiate(reference or self.known.run)
        except (RuntimeError, NotImplementedError) as error:  # the values alone are compared then
            if "not implemented" not in str(error):
                raise
            gradients = False
        if not gradients:
            self.leaves, self.differentiable, self.cotangents, self.gradients = [], [], [], []

    def scatter(self, x: torch.Tensor, sbp: NdSbp) -> Tensors:
        """Shards of `x`, one a rank in grid order: those of before, where it was asked before."""
        _, shards = self._scattered.get((id(x), sbp), (x, None))
        if shards is None:
            shards = cut(x.detach(), sbp, self.shape, self.random, addends)
            self._scattered[id(x), sbp] = x, shards
        return list(shards)

    def _compute_values(self, run: Callable[..., Any]) -> None:
        probes = [t.detach().clone() for t in self.tensors]
        args, kwargs = replaced(self.args, self.kwargs, probes)
        versions = [t._version for t in probes]
        with torch.no_grad(), generator.separate_state(RANDOM):
            self.expected = self.results(run(*args, **kwargs), probes)
        pairs = enumerate(zip(probes, versions, strict=True))
        self.written = [i for i, (t, version) in pairs if t._version != version]
        self.after = {i: probes[i] for i in self.written}
        self.leaves = [i for i, t in enumerate(self.tensors) if self._takes_gradient(i, t)]

    def _takes_gradient(self, i: int, x: torch.Tensor) -> bool:
        if not (x.is_floating_point() or x.is_complex()) or hasattr(x, "takes_no_gradient"):
            return False
        return i not in self.written or (self.known.inplace and i == 0)

    def _differentiate(self, run: Callable[..., Any]) -> None:
        leaves, given = self.track([t.clone() for t in self.tensors])
        args, kwargs = replaced(self.args, self.kwargs, given)
        with generator.separate_state(RANDOM):
            outs = self.results(run(*args, **kwargs), given)
        self.differentiable = [i for i, t in enumerate(outs) if t.requires_grad]
        self.cotangents = [_normal(outs[i], self.random) for i in self.differentiable]
        self.gradients = self.backward(outs, leaves, self.cotangents)

    def on(self, ranks: Grid) -> Expected:
        """The same call on a placement of ``ranks``, with what torch made of it before."""
        other, outs = copy.copy(self), self.call.outs
        other._place(ranks)
        other.call.outs = outs
        other.random, other._scattered = self.random.clone_state(), {}
        return other

    def forward_only(self) -> Expected:
        """The same call without its gradients."""
        other = copy.copy(self)
        other.leaves, other.differentiable, other.cotangents, other.gradients = [], [], [], []
        return other

    def track(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
        """(leaves that take gradients, the tensors to run on). An in-place op writes to a copy
        of its leaf."""
        given = [t.detach() for t in tensors]
        leaves = []
        for i in self.leaves:
            leaves.append(given[i].requires_grad_())
            if i in self.written:
                given[i] = given[i].clone()
        return leaves, given

    def backward(self, outs: Tensors, leaves: Tensors, cotangents: Tensors) -> Tensors:
        """Gradients of `leaves`; zeros where the op has none."""
        pairs = [
            (outs[i], g)
            for i, g in zip(self.differentiable, cotangents, strict=True)
            if outs[i].requires_grad
        ]
        if not pairs or not leaves:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(
            [o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
        )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
