"""A user's ``autograd.Function`` sees whole values, forward and backward, and what it writes lands;
so do scripted functions and custom ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import consistent
from consistent import B, P, Placement, S
from consistent.spec import Sbp, Split
from tests.ranks import in_turn, pool
from tests.twins import GRIDS, Laid, assert_same, compare, distinct, randn

LAYOUTS: tuple[tuple[Sbp, Sbp], ...] = ((S(0), B), (S(1), S(0)), (B, P), (P, S(1)), (P, P), (B, B))
CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any]) -> None:
    for world in in_turn(CASES.index(function)):
        pool(world).run(_all_layouts, function, GRIDS[world], timeout=60)


def _all_layouts(rank: int, function: Callable[..., Any], grid: Any) -> None:
    for layout in distinct(LAYOUTS, grid):
        compare(rank, function, grid, layout)


def _of_vector(layout: Any) -> tuple[Sbp, ...]:
    return tuple(S(0) if isinstance(entry, Split) else entry for entry in layout)


class _Clipped(Function):
    """The gradient is clipped by its norm, which no addend knows."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g / g.norm()


class _Signed(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return (g * y).sign(), (g * x).clamp(-0.5, 0.5)


@case
def backward_is_not_linear(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    _Clipped.apply(x * 2).sin().sum().backward()
    _Signed.apply(x, y).square().sum().backward()
    return x.grad, y.grad


@case
def backward_is_not_linear_and_differentiated_again(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    out = _Clipped.apply(x * y).sin().sum()
    gx, gy = torch.autograd.grad(out, (x, y), create_graph=True)
    (gx.square() * gy).sum().backward()
    return gx, gy, x.grad, y.grad


class _Several(Function):
    """Outputs that are differentiable, are not, and are not tensors; arguments of all kinds."""

    @staticmethod
    def forward(ctx: Any, x: Any, power: int, y: Any, options: dict, *rest: Any) -> Any:
        ctx.power, ctx.count = power, len(rest)
        largest = x.argmax(0)
        ctx.mark_non_differentiable(largest)
        out = x**power * y.sum()
        ctx.save_for_backward(x, y, out)
        return out, largest, x.sum() + options["add"], "text"

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any, g_sum: Any, __: Any) -> Any:
        x, y, out = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx = ctx.power * x ** (ctx.power - 1) * g * y.sum() + g_sum if wanted[0] else None
        dy = (out * g).sum() / y.sum() * torch.ones_like(y) if wanted[2] else None
        return dx, None, dy, None, *(None,) * ctx.count


@case
def several_outputs_and_arguments_of_all_kinds(at: Laid, layout: Any) -> Any:
    found: list[Any] = []
    for asks_x, asks_y in ((True, True), (True, False), (False, True)):
        x = at(randn(5, 4), *layout).requires_grad_(asks_x)
        y = at(randn(4, seed=1) + 3, *_of_vector(layout)).requires_grad_(asks_y)
        out, largest, total, text = _Several.apply(x, 3, y, {"add": 1.0}, None, "more")
        (out.sin().sum() * total).backward()
        found += [out, largest, total, text, largest.requires_grad, x.grad, y.grad]
    return found


@case
def one_of_several_outputs_is_used(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(4, seed=1) + 3)
    _Several.apply(x, 2, y, {"add": 1.0})[2].backward()
    return x.grad, y.grad


class _Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return (1.0 if a is None else 2 * a.sign()) + (1.0 if b is None else 3 * b.sign())


@case
def gradients_of_unused_outputs_are_none(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4), *layout)
    _Unmaterialized.apply(x)[0].sin().sum().backward()
    _Unmaterialized.apply(y)[1].sin().sum().backward()
    return x.grad, y.grad


class _Setup(Function):
    @staticmethod
    def forward(x: Any, w: Any, scale: float = 2.0) -> Any:
        return x @ w * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.scale = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        g = g.clamp(-1, 1) * ctx.scale
        return g @ w.T, x.T @ g, None


@case
def context_set_up_apart(at: Laid, layout: Any) -> Any:
    x, w = at.leaf(randn(5, 4), *layout), at.leaf(randn(4, 3, seed=1), *layout)
    y = _Setup.apply(x, w)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    g.square().sum().backward()
    return y, g, x.grad, w.grad


class _Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (g * x.exp()).round(decimals=1)


@case
def backward_that_is_not_differentiable(at: Laid, layout: Any) -> Any:
    x = at.leaf(randn(5, 4), *layout)
    (g,) = torch.autograd.grad(_Once.apply(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    return g


class _Doubled(Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        x.mul_(2).add_(y)
        return x, x.sum()

    @staticmethod
    def backward(ctx: Any, g: Any, g_sum: Any) -> Any:
        (y,) = ctx.saved_tensors
        g = g + g_sum
        return 2 * g.sign() * y, g.clamp(-1, 1)


@case
def written_in_place(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    z = x * 3
    out, total = _Doubled.apply(z, y)
    assert out is z and not out.is_leaf
    (z * z.detach()).sum().backward(retain_graph=True)
    first = x.grad.clone(), y.grad.clone()
    total.sin().backward()
    return z, total, first, x.grad, y.grad


@case
def written_in_place_without_gradients(at: Laid, layout: Any) -> Any:
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        x, y = at(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
        with mode():
            out, total = _Doubled.apply(x, y)
        assert out is x
        found += [x, total]
    return found


@case
def a_leaf_that_asks_for_gradients_is_not_written(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        _Doubled.apply(x, y)


@case
def a_view_is_written_in_place(at: Laid, layout: Any) -> Any:
    x, y = at(randn(6, 4), *layout), at.leaf(randn(4, seed=1))
    z = x * 1
    _Filled.apply(z[2], y)
    z.sin().sum().backward()
    return z, y.grad


class _Filled(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return torch.zeros_like(g), g.sign()


class _Counting(Function):
    """Writes into a buffer without saying so, as batch norms of others do."""

    @staticmethod
    def forward(ctx: Any, x: Any, seen: Any) -> Any:
        seen.add_(x.detach().abs().sum(0))
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2, None


@case
def buffers_are_written_without_saying_so(at: Laid, layout: Any) -> Any:
    x, seen, plain = (
        at.leaf(randn(5, 4), *layout),
        at(torch.zeros(4).double(), *_of_vector(layout)),
        None,
    )
    plain = torch.zeros(4).double()
    for buffer in (seen, plain, seen):
        _Counting.apply(x, buffer).sum().backward()
    return seen, plain, x.grad


class _Same(Function):
    """Returns what it was given, and what it was not asked for."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x, y.clone()

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return a.sign(), b.sign() * 2


@case
def an_input_is_returned(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    a, b = _Same.apply(x, y)
    (a.sin() * b).sum().backward()
    return a, b, x.grad, y.grad


class _Closing(Function):
    """Reaches a global tensor by its closure alone."""

    weight: Any = None

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * _Closing.weight

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        assert g.shape == _Closing.weight.shape
        return (g * _Closing.weight).clamp(-1, 1)


@case
def a_closure_reaches_global_tensors(at: Laid, layout: Any) -> Any:
    _Closing.weight = at(randn(5, 4, seed=1), *layout)
    x = randn(5, 4).requires_grad_()
    y = _Closing.apply(x)
    y.square().sum().backward()
    return y, x.grad


@case
def forward_mode(at: Laid, layout: Any) -> Any:
    if P in layout:
        return None  # tangents of P are those of the other tests
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(
            at(randn(5, 4), *layout), at(randn(5, 4, seed=1), *layout)
        )
        y = _Tangent.apply(x)
        return torch.autograd.forward_ad.unpack_dual(y).tangent


class _Tangent(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_forward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2

    @staticmethod
    def jvp(ctx: Any, t: Any) -> Any:
        return t / t.norm()


# -- scripted functions and custom ops -------------------------------------------------------------


def relu(x: torch.Tensor, y: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    """Named like an op of torch's, whose rule is another."""
    return x * by + y.sum()


@torch.jit.script
def accumulated(x: torch.Tensor, y: torch.Tensor):
    x.add_(y.sum())
    return x, [y * 2, y + 1]


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(randn(4, seed=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + x.sum()


@case
def scripted_functions(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    out = torch.jit.script(relu)(x, y, by=3.0)
    out.sin().sum().backward()
    module = torch.jit.script(_Scale())
    module(x).sin().sum().backward()
    z = x.detach() * 1
    written, both = accumulated(z, y)
    assert written is z
    return out, x.grad, y.grad, z, both


@torch.library.custom_op("consistent_tests::softmax", mutates_args=())
def custom(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.sum()


def _custom_backward(ctx: Any, g: Any) -> Any:
    x, y = ctx.saved_tensors
    return (g * y.sum()).clamp(-1, 1), (g * x).sum().sign() * torch.ones_like(y)


custom.register_autograd(
    _custom_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("consistent_tests::count", mutates_args={"seen", "times"})
def count(x: torch.Tensor, seen: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    seen.add_(x.abs().sum(0))
    times.add_(1)
    return x.clone()


@case
def custom_ops(at: Laid, layout: Any) -> Any:
    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=1), *layout)
    out = torch.ops.consistent_tests.softmax(x, y)
    out.sin().sum().backward()
    custom(randn(5, 4), y).sin().sum().backward()
    seen, times = (
        at(torch.zeros(4).double(), *_of_vector(layout)),
        at(torch.zeros(2).double(), *_of_vector(layout)),
    )
    for _ in range(3):
        count(x.detach(), seen, times)
    return out, x.grad, y.grad, seen, times


_LOW = torch.library.Library("consistent_tests_low", "DEF")
_LOW.define("add_(Tensor x, Tensor(a!) y) -> ()")
_LOW.define("total(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
_LOW.define("scaled(Tensor x, Tensor(a!)[] ys, float by=2.0) -> Tensor")


def _add(x: torch.Tensor, y: torch.Tensor) -> None:
    """Like a kernel in C++ that writes through a pointer: autograd does not count it."""
    y.detach().numpy()[...] += x.detach().numpy()


def _total(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.detach().numpy()[...] = x.sum()
    return out


def _scaled(x: torch.Tensor, ys: list[torch.Tensor], by: float = 2.0) -> torch.Tensor:
    for y in ys:
        y.detach().numpy()[...] *= by
    return x * by


_LOW.impl("add_", _add, "CPU")
_LOW.impl("total", _total, "CPU")
_LOW.impl("scaled", _scaled, "CPU")


@case
def ops_that_write_past_autograd(at: Laid, layout: Any) -> Any:
    ops, x = torch.ops.consistent_tests_low, at(randn(6, 4), *layout)
    ys = [at(randn(6, 4, seed=i), *layout) for i in range(1, 5)]
    ops.add_(x, ys[0])
    ops.add_.default(x, y=ys[1])
    with torch.inference_mode():
        ops.add_(x, ys[2])
    ops.add_(x[2], ys[3][0])
    ops.add_(ys[0], ys[0])
    out = at(randn(4), *_of_vector(layout))
    assert ops.total(x, out=out) is out
    scaled = ops.scaled(x, [ys[1], ys[2][1:3]])
    plain = torch.zeros(6, 4).double()
    ops.add_(x, plain)
    return x, ys, out, scaled, plain


class _Averaging(Function):
    """Keeps a running mean past autograd."""

    @staticmethod
    def forward(ctx: Any, x: Any, mean: Any, part: Any, unused: Any) -> Any:
        mean.data.mul_(0.5).add_(x.data.mean(0))
        part.data[0] = float("nan")
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2, None, None, None


@case
def functions_that_write_past_autograd(at: Laid, layout: Any) -> Any:
    x, mean = at.leaf(randn(5, 4), *layout), at(randn(4, seed=1), *_of_vector(layout))
    weight = at.leaf(randn(4, seed=2), *_of_vector(layout))
    unused = at(randn(4, seed=3) / 0, *_of_vector(layout))
    (_Averaging.apply(x, weight, mean[:2], unused) * weight).sum().backward()
    assert weight._version == unused._version == 0
    return x.grad, weight, weight.grad, mean, unused


# -- ranks outside the placement -------------------------------------------------------------------


def _outside(rank: int) -> None:
    """A function on a part of the world, between moves in which all ranks take part."""

    def run(at: Callable[[torch.Tensor, Any], Any], move: Callable[[Any, Any], Any]) -> list[Any]:
        x, y = at(randn(5, 4), S(0)).requires_grad_(), at(randn(5, 4, seed=1), P).requires_grad_()
        out, largest, total, text = _Several.apply(move(x, 0) * 2, 3, move(y, 0)[0], {"add": 1.0})
        z = out * 1
        _Doubled.apply(z, move(y, 0))
        move(z, 1).sin().sum().backward()
        w, mean = move(at(randn(6, 4), S(0)), 0), move(at(randn(4), P), 0)
        torch.ops.consistent_tests_low.add_(w, w)
        _Averaging.apply(w, mean, w[2], w)
        return [out, largest, total, text, z, x.grad, y.grad, w, mean]

    whole, part = Placement("cpu", [0, 1, 2]), Placement("cpu", [1, 2])
    given = run(
        lambda x, sbp: consistent.distribute(x, whole, sbp),
        lambda x, to: x.to_global((part, whole)[to], (S(0), B)[to]),
    )
    assert_same(given, run(lambda x, _: x.clone(), lambda x, _: x))


def test_ranks_outside_the_placement_keep_the_graph() -> None:
    pool(3).run(_outside)


def test_reports_name_the_function() -> None:
    with consistent.report() as report:
        x = consistent.ones(3, placement=Placement("cpu", [0]), sbp=B)
        _Clipped.apply(x)
    assert "_Clipped" in str(report)
