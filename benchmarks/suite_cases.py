"""One case of torch_suites.py: compares a sample of torch's module or optimizer database under one
layout with plain torch. It runs on the ranks of a pool."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

import consistent
from benchmarks.coverage_cases import map_tensors, tensors_in
from consistent import B, Placement, S
from consistent.spec import Sbp
from tests.twins import assert_same, randn

Layout = tuple[Sbp, Sbp]  # of parameters, of inputs
LAYOUTS: tuple[Layout, ...] = ((B, B), (B, S(0)), (S(0), B), (S(0), S(0)))
DTYPE = torch.float64
STEPS = 3
# Muon computes its step in bfloat16, whose last bits depend on the order of a sum. The history of
# LBFGS has quotients of differences that are nearly 0.
TOLERANCES: dict[str, dict[str, float]] = {
    "Muon": {"rtol": 2e-3, "atol": 2e-3},
    "LBFGS": {"rtol": 1e-5, "atol": 1e-5},
}


class Side:
    """Makes modules and tensors global in a layout, or leaves them plain if the layout is None."""

    def __init__(self, placement: Placement, layout: Layout | None) -> None:
        self.placement, self.layout = placement, layout

    def _lay(self, x: torch.Tensor, entry: Sbp) -> Any:
        made: Any = x.detach().clone()
        if self.layout is not None:
            made = consistent.distribute(made, self.placement, entry if x.ndim else B)
        return made.requires_grad_(x.requires_grad)

    def inputs(self, value: Any) -> Any:
        entry = B if self.layout is None else self.layout[1]
        return map_tensors(value, lambda x: self._lay(x, entry))

    def parameter(self, x: torch.Tensor) -> Any:
        return self._lay(x.requires_grad_(), B if self.layout is None else self.layout[0])

    def module(self, module: nn.Module) -> nn.Module:
        if self.layout is None:
            return module
        plan = {name: self.layout[0] for name, p in module.named_parameters() if p.ndim}
        return consistent.parallelize(module, self.placement, plan)


# -- modules ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


@lru_cache(maxsize=2)
def _module_samples(name: str) -> list[tuple[bool, Any]]:
    """(training, sample) of a module."""
    info, found = _modules()[name], []
    for training in (False, True):
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=DTYPE, requires_grad=True, training=training
        )
        found += [(training, sample) for sample in samples]
    return found


def _run_module(name: str, index: int, side: Side, seed: int = 0) -> Any:
    """What a sample computes: outputs, gradients of its inputs and parameters, and buffers."""
    training, sample = _module_samples(name)[index]
    made, given = sample.constructor_input, sample.forward_input
    torch.manual_seed(0)
    module = _modules()[name].module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs))
    module = module.to(DTYPE).train(training)
    if isinstance(module, LazyModuleMixin):  # it gets its sizes from its first input
        cast(Any, module)(*given.args, **given.kwargs)
    module = side.module(cast(nn.Module, module))
    args, kwargs = side.inputs((tuple(given.args), dict(given.kwargs)))
    torch.manual_seed(seed)
    out = module(*args, **kwargs)
    losses = [_weighed(x) for x in tensors_in(out) if x.requires_grad]
    if losses:
        sum(losses[1:], losses[0]).backward()
    return {
        "out": out,
        "inputs": [x.grad for x in tensors_in((args, kwargs)) if x.is_leaf],
        "parameters": {key: p.grad for key, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }


def _weighed(x: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=DTYPE).reshape(x.shape)
    return (x * weights.to(x.dtype)).sum()


def _is_random(name: str, index: int, placement: Placement) -> bool:
    """Whether the sample draws random numbers. Ours differ from torch's, but not between
    layouts."""
    plain = Side(placement, None)
    first, second = (_run_module(name, index, plain, seed)["out"] for seed in (0, 1))
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs if not a.isnan().any())


# -- optimizers ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _optimizers() -> dict[str, Any]:
    from torch.testing._internal.common_optimizers import optim_db

    return {info.name: info for info in optim_db}


@lru_cache(maxsize=2)
def _optimizer_samples(name: str) -> list[tuple[bool, dict]]:
    """(sparse gradients, arguments) of an optimizer: each sample in each way that torch steps."""
    info, found = _optimizers()[name], []
    for sample in info.optim_inputs_func(device="cpu"):
        ways = [way for way in info.supported_impls if way != "differentiable"]
        off = dict.fromkeys(ways, False)
        each = [off, *({**off, way: True} for way in ways)]
        found += [(info.only_supports_sparse_grads, {**sample.kwargs, **way}) for way in each]
        if info.supports_sparse:
            found.append((True, {**sample.kwargs, **off}))
    return found


def _run_optimizer(name: str, index: int, side: Side) -> Any:
    """Losses, parameters and states over some steps."""
    sparse, given = _optimizer_samples(name)[index]
    parameters, loss_of = (_embedding if sparse else _layers)(side, name == "Muon")
    optimizer = _optimizers()[name].optim_cls(parameters, **copy.deepcopy(given))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(STEPS)]
    states = [dict(optimizer.state[p]) for p in parameters if p in optimizer.state]
    # The values of sparse tensors are compared, not how many entries they have.
    return losses, parameters, map_tensors(states, lambda x: x.to_dense() if x.is_sparse else x)


def _layers(side: Side, matrices: bool) -> tuple[list[Any], Callable[[], torch.Tensor]]:
    w, v, b = (side.parameter(randn(*s, seed=i)) for i, s in enumerate([(5, 4), (4, 3), (3,)]))
    x = side.inputs(randn(6, 5, seed=3))
    if matrices:
        return [w, v], lambda: ((x @ w).tanh() @ v).square().mean()
    return [w, v, b], lambda: ((x @ w).tanh() @ v + b).square().mean()


def _embedding(side: Side, _: bool) -> tuple[list[Any], Callable[[], torch.Tensor]]:
    w = side.parameter(randn(7, 3))
    rows = side.inputs(torch.tensor([0, 5, 5, 2, 6]))
    return [w], lambda: F.embedding(rows, w, sparse=True).square().mean()


# -- cases -----------------------------------------------------------------------------------------


def names(suite: str) -> list[str]:
    """The modules, or the optimizers, of torch's database."""
    return list(_modules() if suite == "modules" else _optimizers())


def count(suite: str, name: str) -> int:
    """How many samples one of them has."""
    return len((_module_samples if suite == "modules" else _optimizer_samples)(name))


def describe(suite: str, name: str, index: int) -> str:
    """A sample in words."""
    if suite == "optimizers":
        sparse, given = _optimizer_samples(name)[index]
        return f"{name}({given}{', sparse gradients' if sparse else ''})"
    training, sample = _module_samples(name)[index]
    made = sample.constructor_input
    shown = [*map(str, made.args), *(f"{k}={v}" for k, v in made.kwargs.items())]
    return f"{name}({', '.join(shown)}) {'train' if training else 'eval'}"


def run_cases(rank: int, suite: str, name: str, indices: list[int]) -> list[tuple[str, str]]:
    """(outcome, message) of each sample under each layout."""
    warnings.simplefilter("ignore")
    placement = Placement("cpu", list(range(torch.distributed.get_world_size())))
    return [each for index in indices for each in _outcomes(suite, name, index, placement)]


def _outcomes(suite: str, name: str, index: int, placement: Placement) -> Iterator[tuple[str, str]]:
    run = _run_module if suite == "modules" else _run_optimizer
    try:
        wanted = run(name, index, Side(placement, None))
        is_random = suite == "modules" and _is_random(name, index, placement)
    except Exception as error:  # noqa: BLE001 - whatever torch raises for its own sample
        yield from [("torch raises", _words(error))] * len(LAYOUTS)
        return
    for layout in LAYOUTS:
        try:
            given = run(name, index, Side(placement, layout))
            if is_random and layout == LAYOUTS[0]:  # the numbers that other layouts must give
                wanted = map_tensors(given, lambda x: cast(Any, x).detach().full())
            assert_same(given, wanted, "result", **TOLERANCES.get(name, {}))
            yield "right", ""
        except AssertionError as error:
            yield "wrong", _words(error)
        except Exception as error:  # noqa: BLE001 - counted, and shown
            yield "raises", _words(error)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
