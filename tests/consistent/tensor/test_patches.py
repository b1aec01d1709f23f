"""What torch would run past the hook: module hooks, checkpoints, user Functions, guards."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import consistent
from consistent import B, P, S
from tests.consistent.tensor.twins import GRIDS, Laid, compare, randn
from tests.ranks import pool

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any], world: int) -> None:
    pool(world).run(compare, function, GRIDS[world], timeout=30)


def _mlp(at: Laid, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, 3, bias)]
    return at.module(nn.Sequential(*layers).double(), {"0.weight": S(0), "2.weight": S(1)})  # type: ignore[return-value]


def _grads(module: nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters()]


@case
def full_backward_hooks_see_logical_gradients(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    seen: list[Any] = []
    for m in net:
        m.register_full_backward_hook(lambda m, gi, go: seen.extend(g.clone() for g in (*gi, *go)))
    net(x).square().sum().backward()
    return seen, x.grad, _grads(net)


@case
def full_backward_hooks_change_gradients(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    net[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2 + 1,))
    net[2].register_full_backward_hook(lambda m, gi, go: (torch.ones_like(gi[0]),))
    net[2].register_full_backward_pre_hook(lambda m, go: (go[0].sin(),))
    net(x).square().sum().backward()
    return x.grad, _grads(net)


@case
def full_backward_hook_without_input_gradient(at: Laid) -> Any:
    net, x = _mlp(at), at(randn(5, 4), S(0))
    seen: list[Any] = []
    net[0].register_full_backward_hook(
        lambda m, gi, go: seen.append((gi[0] is None, go[0].clone()))
    )
    with pytest.warns(UserWarning, match="Full backward hook"):
        net(x).square().sum().backward()
    return seen, _grads(net)


@case
def forward_hooks(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    net[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    net[2].register_forward_hook(lambda m, a, out: out + 1)
    y = net(x)
    y.sum().backward()
    return y, x.grad, _grads(net)


@case
def checkpoints_of_both_kinds(at: Laid) -> Any:
    found = []
    for reentrant in (False, True):
        for entry in (S(0), B, P):
            net, x = _mlp(at), at.leaf(randn(5, 4), entry)
            y = checkpoint(net, x, use_reentrant=reentrant)
            (y * y).sum().backward()
            found += [y, x.grad, _grads(net)]
    return found


@case
def checkpoint_with_a_closure_and_nested(at: Laid) -> Any:
    net, x, w = _mlp(at), at.leaf(randn(5, 4), S(0)), at.leaf(randn(3, 3, seed=1), B, S(0))

    def inner(z: Any) -> Any:
        return torch.sin(z @ w)

    def outer(z: Any) -> Any:
        return checkpoint(inner, net(z), use_reentrant=False) + z.sum()

    y = checkpoint(outer, x, use_reentrant=False)
    y.square().sum().backward()
    return y, x.grad, w.grad, _grads(net)


@case
def checkpoint_of_a_sequence(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    y = checkpoint_sequential(net, 2, x, use_reentrant=False)
    y.sum().backward()
    return y, x.grad, _grads(net)


class _Cube(torch.autograd.Function):
    """Two inputs, two outputs, one of them not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, power: int) -> Any:
        ctx.save_for_backward(x, y)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x**power * y.sum(), signs

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return 3 * x**2 * g * y.sum(), torch.ones_like(y) * (x**3 * g).sum(), None


@case
def user_function_runs_whole(at: Laid) -> Any:
    found = []
    for entries in ((S(0), B), (B, S(1)), (P, P), (S(1), S(0))):
        x, y = at.leaf(randn(4, 3), *entries), at.leaf(randn(3, seed=1), B, P)
        out, signs = _Cube.apply(x * 2, y, 3)
        (out * signs).sum().backward()
        found += [out, signs, x.grad, y.grad]
    return found


class _SetupStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, w: Any) -> Any:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


@case
def user_function_with_setup_context_and_double_backward(at: Laid) -> Any:
    x, w = at.leaf(randn(4, 3), S(0)), at.leaf(randn(3, 2, seed=1), S(1))
    (g,) = torch.autograd.grad(_SetupStyle.apply(x, w).square().sum(), x, create_graph=True)
    g.square().sum().backward()
    return g, x.grad, w.grad


@case
def user_function_with_a_plain_tensor(at: Laid) -> Any:
    x, w = at.leaf(randn(4, 3), S(0)), randn(3, 2, seed=1)
    y = _SetupStyle.apply(x, w)
    y.sum().backward()
    return y, x.grad


@case
def amp_autocast(at: Laid) -> Any:
    x, w = at.leaf(randn(4, 8).float(), S(0)), at.leaf(randn(8, 2, seed=1).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
    y.float().sum().backward()
    return y.dtype, x.grad.dtype, y.float(), x.grad


@case
def dropout_repeats_in_a_checkpoint(at: Laid) -> Any:
    x = at.leaf(torch.ones(64, 4, dtype=torch.float64), S(0))
    ok = []
    for reentrant in (False, True):
        x.grad = None
        y = checkpoint(lambda z: nn.functional.dropout(z, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        ok.append(bool((x.grad == y).all()) and 0 < int((y == 0).sum()) < 256)
    return ok


# -- guards --------------------------------------------------------------------------------


def _refused(rank: int, call: str) -> str:
    """The message of the error that ``call`` raises."""
    x = consistent.distribute(randn(4, 2), consistent.placement("cpu", [0, 1]), S(0))
    for module in ("torch.distributed.nn.functional", "torch.distributed._functional_collectives"):
        if call.startswith(module):
            importlib.import_module(module)
    scope = {
        "x": x,
        "torch": torch,
        "dist": dist,
        "local": x.to_local(),
        "consistent": consistent,
        "S": S,
        "B": B,
    }
    try:
        eval(call, scope)  # noqa: S307 - lines of this file
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    "call",
    [
        "torch.tensor(x)", "torch.as_tensor(x)", "torch.asarray(x)", "torch.from_dlpack(x)",
        "torch.tensor([x[0, 0], x[1, 1]])",
        "dist.all_reduce(x)", "dist.broadcast(x, 0)", "dist.all_gather([x, x], local)",
        "dist.all_gather([local, local], x)",
        "dist.send(x, 1 - dist.get_rank())", "dist.reduce_scatter_tensor(x, x)",
        "dist.all_to_all([x], [x])",
        "torch.distributed.distributed_c10d.all_reduce(x)",
        "dist.all_gather_object([None, None], x)",
        "dist.broadcast_object_list([x])", "torch.distributed.nn.functional.all_reduce(x)",
        "torch.distributed._functional_collectives.all_reduce(x, 'sum', dist.group.WORLD)",
        "torch.vmap(torch.sin)(x)", "torch.func.grad(lambda t: t.sum())(x)",
        "torch.func.vjp(torch.sin, x)",
        "torch.func.jacrev(torch.sin)(x)", "torch.func.jacfwd(torch.sin)(x)",
        "torch.func.functionalize(torch.sin)(x)",
        "torch.vmap(lambda t: t + x)(local)", "torch.func.hessian(lambda t: t.sum())(x)",
        "torch.func.linearize(torch.sin, x)", "torch.func.grad(lambda t: (t * x).sum())(local)",
        "torch.nested.nested_tensor([x, x])", "torch.nested.as_nested_tensor([x, local])",
        "torch.nested.nested_tensor([x, x], layout=torch.jagged)",
        "torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 4]))",
        "torch.nested.narrow(x, 1, 0, 1, layout=torch.jagged)",
        "torch.nested.masked_select(x, x > 0)",
        "torch.autograd.grad(x.clone().requires_grad_().sin(), x, is_grads_batched=True)",
    ],
)  # fmt: skip
def test_what_would_see_the_shard_only_is_refused_on_every_rank(call: str) -> None:
    for message in pool(2).run(_refused, call):
        assert "global tensor" in message and ("Use " in message or "Call " in message), message
