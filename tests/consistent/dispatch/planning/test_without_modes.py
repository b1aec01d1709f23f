"""The first call of an op, which plans it, looks like the second to whoever watches."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import consistent
from consistent import B, GlobalTensor, P, Placement, S
from consistent.dispatch.planning.without_modes import _IGNORE_FILTER, without_modes
from consistent.dispatch.plans.plan import clear_plans
from mirrored.transports.default import current
from tests.brute_force import Example
from tests.consistent.rules import examples
from tests.modes import Functions, Ops
from tests.ranks import ALL, pool
from tests.twins import randn

FAMILIES = sorted(
    p.stem for p in Path(examples.__file__).parent.glob("*.py")
    if p.stem not in ("__init__", "numbers")
)  # fmt: skip


@contextmanager
def _saved(seen: list[str]) -> Iterator[None]:
    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append("saved")
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield


@contextmanager
def _flops(seen: list[str]) -> Iterator[None]:
    with FlopCounterMode(display=False) as counter:
        yield
    seen.append(f"{counter.get_total_flops()} flops")


@contextmanager
def _profiled(seen: list[str]) -> Iterator[None]:
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        yield
    seen += [f"event {event.name}" for event in profile.function_events or ()]


@contextmanager
def _warned(seen: list[str]) -> Iterator[None]:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # those that come once, too
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
    finally:
        torch.set_warn_always(always)
    seen += [f"warning {w.category.__name__} {w.message}" for w in found]


WATCHERS: tuple[Callable[[list[str]], Any], ...] = (
    _warned, _saved, _flops, _profiled, Ops, Functions
)  # fmt: skip


def _call(example: Example, entry: Any) -> tuple[Callable[..., Any], tuple, dict]:
    """The example with its first tensor under ``entry`` and the others B."""
    placement, entries = Placement("cpu", [0, 1]), iter((entry,))

    def lay(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        sbp = next(entries, B)
        fits = x.ndim > 0 if sbp == S(0) else x.is_floating_point()
        given = consistent.distribute(x, placement, sbp if fits else B)
        return given.requires_grad_(x.is_floating_point() or x.is_complex())

    args, kwargs = tree_map(lay, (example.args, example.kwargs))
    return example.func, args, kwargs


def _watched(example: Example, entry: Any, watchers: Any) -> list[str]:
    func, args, kwargs = _call(example, entry)
    seen: list[str] = []
    torch.manual_seed(0)
    try:
        args = tree_map(lambda x: x * 1 if isinstance(x, GlobalTensor) else x, args)  # no leaf
        state = torch.get_rng_state()
        with ExitStack() as stack:
            for watch in watchers:
                stack.enter_context(watch(seen))
            out = func(*args, **kwargs)
        seen.append(f"random {bool((torch.get_rng_state() == state).all())}")
    except Exception as error:  # noqa: BLE001 - both calls are to raise it
        return [*seen, f"{type(error).__name__}: {error}"]
    del out
    return seen


def _compare(rank: int, family: str) -> list[str]:
    found = []
    # A profiler rightly sees the messages by which ranks meet in shared memory the first time.
    current().all_reduce(torch.ones(1), (0, 1))
    module = importlib.import_module(f"tests.consistent.rules.examples.{family}")
    for number, example in enumerate(module.EXAMPLES[:: 1 if ALL else 8]):
        for entry in (S(0), P) if ALL else ((S(0), P)[number % 2],):
            clear_plans()
            first, second = (_watched(example, entry, WATCHERS) for _ in range(2))
            if first != second:
                found.append(f"{example} under {entry}:\n  {first}\n  {second}")
    return found


# -- programs --------------------------------------------------------------------------------------


def _net() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(8, 16),
        torch.nn.GELU(),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 4),
    ]
    net = torch.nn.Sequential(*layers)
    placement = Placement("cpu", [0, 1])
    net = consistent.parallelize(net, placement, {"0.weight": S(0), "0.bias": S(0)})
    return net, consistent.distribute(randn(6, 8).float(), placement, S(0))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(rank: int) -> list[list[torch.Tensor]]:
    """Gradients of the first and the second step, and without checkpointing."""
    found = []
    clear_plans()
    for kind in ("selective", "selective", "none"):
        net, x = _net()
        if kind == "none":
            y = net(x)
        else:
            y = checkpoint(
                net, x, use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(_policy),
            )  # fmt: skip
        y.square().sum().backward()
        found.append([p.grad.full() for p in net.parameters()])
    return found


def test_selective_checkpointing_is_right_from_the_first_step() -> None:
    for first, second, plain in pool(2).run(_selective):
        for a, b, wanted in zip(first, second, plain, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, wanted)


def _flops_of_steps(rank: int) -> list[int]:
    net, x = _net()
    found = []
    clear_plans()
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            net(x).square().sum().backward()
        found.append(counter.get_total_flops())
    return found


def test_flops_are_counted_once() -> None:
    for first, second in pool(2).run(_flops_of_steps):
        assert first == second > 0


def _under(rank: int, mode: str) -> list[Any]:
    """A plan made under a mode serves afterwards; the values are those of a plan made without."""
    net, x = _net()
    clear_plans()
    with MODES[mode]():
        net(x.detach())
    after = net(x).square().sum()
    after.backward()
    found = [after.full(), *(p.grad.full() for p in net.parameters())]
    clear_plans()
    net.zero_grad()
    wanted = net(x).square().sum()
    wanted.backward()
    assert all(map(torch.equal, found, [wanted.full(), *(p.grad.full() for p in net.parameters())]))
    return found


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "excluded": lambda: torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    ),
    "saved": lambda: torch.autograd.graph.disable_saved_tensors_hooks("off"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_made_under_a_mode_serves_without_it(mode: str) -> None:
    pool(2).run(_under, mode)


def test_all_is_as_before_afterwards() -> None:
    ops: list[str] = []
    with torch.autocast("cpu", dtype=torch.float16), torch.inference_mode(), Ops(ops):
        with torch.autograd.set_detect_anomaly(True), without_modes():
            torch.empty(1)
            assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled() and not torch.is_anomaly_enabled()
            assert torch.get_autocast_dtype("cpu") is torch.float16 and not ops
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
        torch.empty(1)
    assert ops == ["op aten.empty.memory_format"]
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


# Each warns once a call; torch itself says the first two once in a process.
WARN: dict[str, Callable[[Any], Any]] = {
    "meshgrid": lambda x: torch.meshgrid(x[0], x[0]),
    "cross": lambda x: torch.cross(x, x),
    "std": lambda x: x[:1].std(0),
    "softmax": torch.nn.functional.softmax,
    "upsample": lambda x: torch.nn.functional.upsample(x[None], scale_factor=2),
    "sigmoid": torch.nn.functional.sigmoid,
}


def _warnings_of(rank: int, name: str) -> list[list[str]]:
    """Of two calls on a global tensor after two plain ones, with the user's filters as they were
    set and torch saying things once."""
    found = []
    x = randn(4, 3)
    for given in (x, x, consistent.distribute(x, Placement("cpu", [0, 1]), B)):
        for filters in ("always", "error"):
            clear_plans()
            for _ in range(2):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter(filters)  # type: ignore[arg-type]
                    torch.set_warn_always(True)
                    before = warnings.filters.count(_IGNORE_FILTER)  # type: ignore[attr-defined]
                    try:
                        WARN[name](given)
                    except Warning as warning:
                        seen.append(warning)  # type: ignore[arg-type]
                    finally:
                        torch.set_warn_always(False)
                    assert warnings.filters.count(_IGNORE_FILTER) == before  # type: ignore[attr-defined]
                found.append([str(getattr(w, "message", w)) for w in seen])
    return found


@pytest.mark.parametrize("name", WARN)
def test_a_warning_comes_as_often_as_in_torch(name: str) -> None:
    for found in pool(2).run(_warnings_of, name):
        plain, ours = found[:4], found[8:]
        assert [len(x) for x in ours] == [len(x) for x in plain], found


@pytest.mark.parametrize("family", FAMILIES)
def test_planning_is_not_seen(family: str) -> None:
    for found in pool(2).run(_compare, family, timeout=300):
        assert not found, "\n".join(found)
