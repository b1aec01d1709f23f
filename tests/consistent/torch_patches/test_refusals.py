"""Ways round the hook: what torch does without asking for it is right, or raises on every rank."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import consistent
from consistent import B, GlobalTensor, P, Placement, S
from tests.ranks import ALL, on_ranks, pool
from tests.twins import randn

LAYOUTS = {"S(0)": S(0), "B": B, "P": P}


def _laid(name: str, x: torch.Tensor) -> Any:
    return consistent.distribute(x, Placement("cpu", [0, 1]), LAYOUTS[name])


def _scope(layout: str, call: str) -> dict[str, Any]:
    """The names that a call uses; the modules if it does."""
    x = _laid(layout, randn(4, 2))
    modules = {"net": {"*": B}, "zero3": "zero3"}
    made = {
        name: consistent.parallelize(torch.nn.Linear(2, 2).double(), x.placement, plan)
        for name, plan in modules.items()
        if name in call
    }
    return made | {
        "x": x,
        "local": x.to_local(),
        "plain": torch.zeros(4, 2, dtype=torch.float64),
        "shaped": torch.zeros_like(x.to_local()),
        "complex": torch.zeros(4, 2, dtype=torch.complex128),
        "leaf": torch.zeros(4, 2, dtype=torch.float64, requires_grad=True),
        "mesh": dist.init_device_mesh, "DTensor": DTensor, "distribute_tensor": distribute_tensor,
        "__name__": __name__, "assign": setattr, "torch": torch, "np": np, "dist": dist,
        "consistent": consistent,
        "make_fx": make_fx, "DDP": DistributedDataParallel, "copy": copy, "S": S, "B": B,
        "call": _call,
    }  # fmt: skip


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of a module that ``import torch`` does not import."""
    import importlib

    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


REFUSED = {
    "made from a tensor, in C": [
        "torch.Tensor(x)", "torch.DoubleTensor(x)", "torch.FloatTensor([x[0, 0]])",
        "torch.Tensor._make_subclass(torch.Tensor, x)", "plain.new(x)",
    ],
    "shared memory": [
        "np.from_dlpack(x)", "torch.from_dlpack(x)", "torch.utils.dlpack.to_dlpack(x)",
        "torch._C._to_dlpack(x)", "x.__dlpack__()", "plain.set_(x)", "shaped.set_(x)",
    ],
    "properties of a plain tensor": [
        *(f"assign({owner}, '{name}', x)"
          for owner in ("plain", "shaped", "leaf", "complex")
          for name in ("data", "grad", "_grad", "real", "imag")),
    ],
    "tracers": [
        "torch.jit.trace(torch.sin, (x,))", "torch.jit.trace(lambda t: t + x, (plain,))",
        "torch.jit.trace(net, (plain,))", "torch.jit.trace_module(net, {'forward': plain})",
        "make_fx(torch.sin)(x)", "make_fx(lambda t: t + x)(plain)",
        "make_fx(torch.sin, tracing_mode='fake')(x)",
        "torch.export.export(net, (plain,))", "torch.export.export(net, (x,))",
        "torch.export.export(zero3, (plain,))", "torch.jit.trace(zero3, (plain,))",
        "torch.jit.script(zero3)",
    ],
    "collectives": [
        "dist.all_reduce(x)", "dist.broadcast(x, 0)", "dist.all_gather([x, x], local)",
        "dist.all_gather([local, local], x)", "dist.send(x, 1 - dist.get_rank())",
        "dist.reduce_scatter_tensor(x, x)", "dist.all_to_all([x], [x])",
        "dist.distributed_c10d.all_reduce(x)", "dist.all_gather_object([None, None], x)",
        "call('torch.distributed.nn.functional.all_reduce', x)",
        "call('torch.distributed._functional_collectives.all_reduce', x, 'sum', dist.group.WORLD)",
    ],
    "wrappers that communicate by themselves": [
        "DDP(net)", "call('torch.distributed.fsdp.fully_shard', net)",
        "call('torch.distributed.fsdp.fully_shard', [net])",
        "call('torch.distributed.fsdp.FullyShardedDataParallel', net)",
        "call('torch.distributed._composable.replicate', net)", "torch.nn.DataParallel(net)",
        "call('torch.distributed.tensor.parallel.parallelize_module', net, mesh('cpu', (2,)), {})",
        "DTensor.from_local(x, mesh('cpu', (2,)))", "distribute_tensor(x, mesh('cpu', (2,)))",
    ],
    "transforms": [
        "torch.vmap(torch.sin)(x)", "torch.func.grad(lambda t: t.sum())(x)",
        "torch.func.vjp(torch.sin, x)", "torch.func.jacrev(torch.sin)(x)",
        "torch.func.jacfwd(torch.sin)(x)", "torch.func.functionalize(torch.sin)(x)",
        "torch.vmap(lambda t: t + x)(plain)", "torch.func.hessian(lambda t: t.sum())(x)",
        "torch.func.linearize(torch.sin, x)",
        "torch.func.jvp(lambda t: t.cumsum(0).sum(), (x,), (x,))",
        "torch.func.grad(lambda t: (t * x).sum())(plain)",
        "torch.autograd.grad(x.clone().requires_grad_().sin(), x, is_grads_batched=True)",
    ],
    "nested tensors": [
        "torch.nested.nested_tensor([x, x])", "torch.nested.as_nested_tensor([x, local])",
        "torch.nested.nested_tensor([x, x], layout=torch.jagged)",
        "torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 4]))",
        "torch.nested.narrow(x, 1, 0, 1, layout=torch.jagged)",
        "torch.nested.masked_select(x, x > 0)",
    ],
}  # fmt: skip


def _refused(rank: int, calls: list[str]) -> dict[str, str]:
    """The message of the error that each call raises, for each layout."""
    return {f"{call} of {layout}": _raised_by(call, layout) for call in calls for layout in LAYOUTS}


def _raised_by(call: str, layout: str) -> str:
    """The message of the error that ``call`` raises; nothing of it stays behind."""
    scope = _scope(layout, call)
    before = {name: copy.copy(scope[name]) for name in ("shaped", "plain", "complex")}
    try:
        eval(call, scope)  # noqa: S307 - lines of this file
        return "no error"
    except Exception as error:  # noqa: BLE001
        message = f"{type(error).__name__}: {error}"
    for name, value in before.items():
        assert scope[name].__class__ is torch.Tensor and torch.equal(scope[name], value), call
    assert scope["plain"].grad is None and scope["leaf"].grad is None, call
    if ALL or layout == "S(0)":
        _works()
    return message


def _works() -> None:
    """Global tensors and tracers of plain ones do what they did."""
    x = randn(3, 2)
    assert torch.equal((_laid("S(0)", x) * 2).full(), x * 2)
    assert torch.equal(torch.jit.trace(torch.sin, (x,))(x), x.sin())
    assert torch.equal(make_fx(torch.sin)(x)(x), x.sin())
    leaf = _laid("S(0)", x).requires_grad_()
    leaf.square().sum().backward()
    assert torch.equal(leaf.grad.full(), x * 2)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_see_the_shard_only_is_refused_on_every_rank(kind: str) -> None:
    for messages in pool(2).run(_refused, REFUSED[kind]):
        wrong = {call: message for call, message in messages.items() if not _says_why(message)}
        assert not wrong, "\n".join(f"{call}: {message}" for call, message in wrong.items())


def _says_why(message: str) -> bool:
    """Whether it names the tensor, and what to use in place of the call."""
    names = "global tensor" in message or "on placement(" in message
    return names and ("Use " in message or "Call " in message)


def test_every_property_that_takes_a_tensor_is_refused() -> None:
    """Torch may add some."""
    takes = set()
    for dtype in (torch.float32, torch.complex64):
        for name, found in inspect.getmembers(torch._C.TensorBase):
            x = torch.zeros(2, dtype=dtype)
            try:
                if isinstance(found, types.GetSetDescriptorType):
                    setattr(x, name, torch.ones(2))
                    takes.add(name)
            except (AttributeError, RuntimeError, TypeError):
                pass
    others = {"_backward_hooks", "_post_accumulate_grad_hooks", "volatile"}
    assert takes - others == {"data", "grad", "_grad", "real", "imag"}


# -- what is right ---------------------------------------------------------------------------------


def _pieces(x: Any) -> list[Any]:
    return [x[0, 0], x[1, 1] * 2]


MADE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "torch.tensor": lambda x, _: torch.tensor(x.detach()),
    "torch.tensor of a list": lambda x, _: torch.tensor(_pieces(x)),
    "torch.tensor of lists": lambda x, _: torch.tensor([_pieces(x), [1.0, 2.0]]),
    "torch.as_tensor": lambda x, _: torch.as_tensor(x),
    "torch.as_tensor to a dtype": lambda x, _: torch.as_tensor(x, dtype=torch.float32),
    "torch.as_tensor of a list": lambda x, _: torch.as_tensor(_pieces(x)),
    "torch.asarray": lambda x, _: torch.asarray(x),
    "torch.asarray of a list": lambda x, _: torch.asarray(_pieces(x)),
    "new_tensor of a global one": lambda x, plain: plain.new_tensor(x.detach()),
    "new_tensor by a global one": lambda x, plain: x.new_tensor([[1.0, 2.0]]),
    "new_tensor of a list": lambda x, plain: plain.new_tensor(_pieces(x)),
    "torch.full": lambda x, _: torch.full((2,), x[0, 0]),
    "torch.arange": lambda x, _: torch.arange(x.abs().sum().ceil()),
    "torch.linspace": lambda x, _: torch.linspace(x[0, 0], x[1, 1], 3),
    "alpha": lambda x, plain: torch.add(plain, plain + 1, alpha=x[0, 0]),
    "clamp": lambda x, plain: (plain + 1).clamp(max=x[0, 0]),
    "fill_": lambda x, plain: plain.clone().fill_(x[0, 0]),
    "sparse_coo_tensor": lambda x, _: torch.sparse_coo_tensor(
        torch.tensor([[0, 3], [1, 0]]), x[:2, 0], (4, 2)
    ).to_dense(),
    "an index": lambda x, plain: plain[(x[0, 0] * 0).long()],
    "a size": lambda x, plain: torch.ones(int((x[0, 0] * 0).long()) + 2),
    "numpy.asarray": lambda x, _: torch.from_numpy(np.asarray(x.detach())),
    "nn.Parameter": lambda x, _: torch.nn.Parameter(x).detach(),
    "deepcopy": lambda x, _: copy.deepcopy(x),
    "functional_call": lambda x, _: torch.func.functional_call(
        torch.nn.Linear(2, 4, bias=False).double(), {"weight": x}, (torch.ones(1, 2).double(),)
    ),
    "default_collate": lambda x, _: torch.utils.data.default_collate([x, x]),
    "fx": lambda x, plain: torch.fx.symbolic_trace(lambda t: torch.sin(t) @ t.T)(x),
    "torch.compile": lambda x, _: torch.compile(lambda t: t.sin() + t, backend="eager")(x),
    "torch.compile of a closure": lambda x, plain: torch.compile(
        lambda t: t + x, backend="eager"
    )(plain),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MADE)
@on_ranks(2, timeout=60)
def test_numbers_and_copies_are_those_of_the_whole(rank: int, name: str, layout: str) -> None:
    value = randn(4, 2)
    plain = torch.zeros(4, 2, dtype=torch.float64)
    x = _laid(layout, value)
    found, wanted = MADE[name](x, plain), MADE[name](value, plain)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    found = found.full() if isinstance(found, GlobalTensor) else found
    torch.testing.assert_close(found, wanted)


WRAPPERS = [
    call for calls in REFUSED.values() for call in calls if "net)" in call and "jit" not in call
]


def _wrapped(rank: int, call: str) -> str:
    scope = _scope("B", call)
    before = type(scope["net"]), dict(scope["net"].named_parameters())
    with pytest.raises(TypeError) as caught:
        eval(call, scope)  # noqa: S307 - lines of this file
    net = scope["net"]
    assert type(net) is before[0] and not net._forward_pre_hooks
    assert all(x is before[1][name] for name, x in net.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize("call", WRAPPERS)
def test_a_wrapper_is_refused_before_it_changes_the_module(call: str) -> None:
    for message in pool(2).run(_wrapped, call):
        assert "parallelize(module, placement, plan) left it" in message, message
