"""The hook: what it keeps, what it lets go, and that nothing a call does can confuse the next."""

from __future__ import annotations

import gc
import pickle
import re
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import consistent
from consistent import B, S
from consistent.dispatch import _C
from consistent.dispatch.plans.plan import plans
from consistent.spec.tracer import Tracer
from tests.ranks import ALL

HERE, ROWS = consistent.placement("cpu", [0]), S(0)


def laid(x: torch.Tensor, sbp: Any = ROWS) -> Any:
    return consistent.distribute(x, HERE, sbp)


def _calls(x: Any, w: Any, b: Any) -> list[Callable[[], Any]]:
    """One of each kind of way through the hook."""
    return [
        lambda: x + x,
        lambda: x * 2.0,
        lambda: torch.relu(x),
        lambda: x.sum(dim=1, keepdim=True),
        lambda: x.view(-1, 2, 2),
        lambda: x.chunk(2, dim=1),
        lambda: torch.cat([x, x], dim=1),
        lambda: x[:, 1:3],
        lambda: x.mul_(1.0),
        lambda: F.layer_norm(x, (4,), b, b),
        lambda: torch.topk(x, 2, dim=1),
        lambda: torch.addmm(b, x, w),
        lambda: torch.mm(x.T, x) + w,  # an addend is boxed first
        lambda: torch.cat([torch.mm(x.T, x), w], dim=1),
    ]


# -- nothing leaks ---------------------------------------------------------------------------------


OPS = 1_000_000 if ALL else 200_000


def test_many_ops_leave_no_reference_and_no_memory() -> None:
    x, w, b = laid(torch.randn(4, 4)), laid(torch.randn(4, 4), B), laid(torch.randn(4), B)
    calls = _calls(x, w, b)
    for call in calls * 50:
        call()
    gc.collect()
    kept = [x._spec, x, w, torch.relu, HERE, plans.values()[0]]
    before = [sys.getrefcount(value) for value in kept]
    count, objects = len(plans), len(gc.get_objects())
    grown = []  # KiB of every quarter: what is lost at each op grows in all of them
    for _ in range(4):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(OPS // 4 // len(calls)):
            for call in calls:
                call()
        grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
    gc.collect()
    assert [sys.getrefcount(value) for value in kept] == before
    assert len(plans) == count
    assert abs(len(gc.get_objects()) - objects) < 100
    assert min(grown) < 8 * OPS / 4 / 1024, grown  # 8 bytes an op


def test_the_hook_hands_out_tensors_that_die_when_dropped() -> None:
    x = laid(torch.randn(4, 4))
    _ = x + x  # the plan keeps the spec
    spec, before = x._spec, sys.getrefcount(x._spec)
    made = [x + x for _ in range(100)]
    assert sys.getrefcount(spec) == before + 100
    del made
    assert sys.getrefcount(spec) == before


# -- what an op raises -----------------------------------------------------------------------------


def test_an_op_that_raises_leaves_the_hook_as_it_was() -> None:
    x, bad = laid(torch.randn(4, 4)), laid(torch.randn(3), B)
    index = laid(torch.tensor([7]), B)
    before = None
    for turn in range(2000):
        for call in (lambda: x + bad, lambda: torch.index_select(x, 1, index), lambda: x.foo):
            with pytest.raises((RuntimeError, IndexError, AttributeError)):
                call()
        assert torch._C._is_torch_function_enabled()
        if turn == 100:
            gc.collect()  # what earlier tests left may hold the same spec
            before = sys.getrefcount(x._spec), sys.getrefcount(x)
    gc.collect()
    assert (sys.getrefcount(x._spec), sys.getrefcount(x)) == before
    assert torch.equal((x + 1).full(), x.full() + 1)


def test_an_error_of_the_op_is_torchs_own() -> None:
    plain = torch.randn(4, 4)
    x = laid(plain)
    for call in (lambda t: t.view(3, 5), lambda t: t.sum(dim=7), lambda t: t @ t[:3]):
        with pytest.raises((RuntimeError, IndexError)) as torchs:
            call(plain)
        with pytest.raises(torchs.type):
            call(x)


@pytest.mark.parametrize("given", [(), (1,), (1, 2), (torch.relu, (), 3), (torch.relu, (), (), 4)])
def test_the_hook_refuses_what_torch_never_gives_it(given: tuple) -> None:
    with pytest.raises(TypeError, match="torch_function"):
        _C.torch_function(*given)


def test_a_tensor_without_a_spec_is_said_so() -> None:
    x = laid(torch.randn(2))
    del x.__dict__["_spec"]
    with pytest.raises(AttributeError, match="_spec"):
        torch.relu(x)


# -- threads ---------------------------------------------------------------------------------------


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001  (shown below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_plan_run_and_forget_at_once() -> None:
    def work(index: int) -> None:
        for turn in range(150):
            plain = torch.randn(2 + (turn + index) % 40, 4)
            x = laid(plain)
            assert torch.equal((x + x).view(-1).to_local(), (plain + plain).view(-1))
            assert torch.equal(torch.cat([x, x], dim=1).to_local(), torch.cat([plain, plain], 1))
            if index == 0 and turn % 10 == 0:
                plans.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        _in_threads(4, work)
    finally:
        sys.setswitchinterval(before)


def test_hooks_run_ops_inside_the_engine_in_several_threads() -> None:
    def work(index: int) -> None:
        for _ in range(20):
            x = laid(torch.randn(4, 4)).requires_grad_()
            y = x * 2.0
            y.register_hook(lambda grad: grad * 3.0 + 0.0 * grad.sum())
            (y * y).sum().backward()
            assert torch.allclose(x.grad.full(), 24 * x.detach().full())

    _in_threads(3, work)


def test_a_thread_that_turns_the_hook_off_does_so_for_itself() -> None:
    x = laid(torch.randn(2, 2))
    inside, go_on = threading.Event(), threading.Event()

    def off() -> None:
        with torch._C.DisableTorchFunctionSubclass():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=off)
    thread.start()
    inside.wait(10)
    assert (x + x)._spec is x._spec
    go_on.set()
    thread.join()


# -- keys ------------------------------------------------------------------------------------------

STATIC = st.recursive(
    st.sampled_from(
        [
            0, 1, -1, 2**70, True, False, 1.0, 2.5, 1j, None, "a", "b", "1", Ellipsis,
            torch.float32, torch.int64, torch.device("cpu"), torch.strided, torch.Size([1, 2]),
            slice(None), slice(1, None), slice(None, 1), slice(1, 2, 3), range(3), b"a",
            torch.zeros(2), torch.ones(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


def probe() -> None:
    """Stands for an op."""


def reference_key(value: Any) -> Any:
    """What a key has to tell apart: numbers that Python holds equal but torch treats apart (1, 1.0,
    True) differ, floats count by type, and a plain tensor by its shape and dtype."""
    kind = value.__class__
    if kind is slice:
        return (slice, *map(reference_key, (value.start, value.stop, value.step)))
    if kind in (tuple, list, torch.Size):
        return (kind, *map(reference_key, value))
    if kind is dict:
        return (dict, *((name, reference_key(item)) for name, item in value.items()))
    if kind in (float, complex):
        return kind
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.shape, value.dtype)
    return (kind, value)


@given(st.lists(st.tuples(st.lists(STATIC, max_size=3).map(tuple), st.dictionaries(
    st.sampled_from(["dim", "out", "p"]), STATIC, max_size=2)), max_size=6))  # fmt: skip
def test_calls_share_a_key_just_where_they_are_alike(calls: list) -> None:
    for args, kwargs in calls:
        for others, others_kwargs in calls:
            same = _C.key_of(probe, args, kwargs, False) == _C.key_of(
                probe, others, others_kwargs, False
            )
            alike = reference_key(args) == reference_key(others)
            assert same == (alike and reference_key(kwargs) == reference_key(others_kwargs))


def test_equal_keys_of_unhashable_and_of_changing_arguments() -> None:
    x = laid(torch.randn(4, 4))
    index = [0, 2]
    first = x[:, index]
    index.append(3)
    assert first.shape == (4, 2) and x[:, index].shape == (4, 3)
    assert torch.equal(x[:, index].to_local(), x.to_local()[:, index])


# -- ways through ----------------------------------------------------------------------------------


def test_methods_and_functions_ask_the_mode_that_is_on_first() -> None:
    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x, names = laid(torch.randn(2, 2)), []
    with Log():
        y = torch.relu(x + x)
    assert {"add", "relu"} <= set(names) and y._spec is x._spec


def test_a_method_looks_like_torchs() -> None:
    method = consistent.GlobalTensor.add
    assert method.__name__ == "add" and method.__doc__ == torch.Tensor.add.__doc__
    plain = torch.ones(2)
    assert torch.equal(method(plain, plain), plain + plain)
    x = laid(plain)
    assert torch.equal(method(x, other=x, alpha=2).to_local(), 3 * plain)
    assert torch.equal((plain + x).full(), 2 * plain) and torch.equal((plain - x).full(), 0 * plain)


def test_functions_go_straight_to_the_hook_and_stay_torchs_objects(monkeypatch: Any) -> None:
    plain = torch.randn(4, 4)
    x, b = laid(plain), laid(plain[0], B)
    calls: list[Callable[[Any, Any], Any]] = [
        lambda x, b: torch.relu(x),
        lambda x, b: F.linear(x, b[None], bias=None),
        lambda x, b: torch.cat([x, x], dim=1),
        lambda x, b: torch._foreach_add([x, b], 1.0)[0],
    ]
    expected = [call(plain, plain[0]) for call in calls]
    monkeypatch.delattr(consistent.GlobalTensor, "__torch_function__")  # what torch would look for
    for call, value in zip(calls, expected, strict=True):
        assert torch.equal(call(x, b).to_local(), value)
    assert torch.is_floating_point(x) and not torch.is_complex(x)
    assert pickle.loads(pickle.dumps(torch.relu)) is torch.relu is torch._C._VariableFunctions.relu
    assert "torch.relu(x)" in torch.fx.symbolic_trace(lambda x: torch.relu(x)).code


def test_a_function_refuses_what_torch_refuses_in_its_words() -> None:
    plain = torch.randn(2)
    for call in (lambda t: torch.relu(t, 3), lambda t: torch.cat([t, 1]), lambda t: F.linear(t)):
        with pytest.raises(TypeError) as torchs:
            call(plain)
        with pytest.raises(TypeError, match=re.escape(str(torchs.value).split("\n")[0])):
            call(laid(plain))
    assert not _C.enter_function(len)


def test_a_watched_op_is_seen_whatever_its_way() -> None:
    x, seen = laid(torch.randn(4, 4)), []
    with Tracer(on_op_end=lambda plan, *_: seen.append(plan.name)).tracing():
        _ = x + x, torch.relu(x), F.softmax(x, dim=1), x.view(-1, 2, 2)
    assert seen == ["add", "relu", "softmax", "view"]
