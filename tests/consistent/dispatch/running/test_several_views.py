"""Views of which an op gives several, written in place: each op, grad mode and layout against plain
torch, where it refuses as well as where it does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from consistent.spec import B, Placement, S
from consistent.tensor.making.create import distribute
from tests.ranks import ALL, pool

W = torch.linspace(-1, 2, 48, dtype=torch.float64).view(6, 4, 2)


def _cut(dim: int, *sizes: int) -> Callable[[Any], list[Any]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return lambda x: [x.narrow(dim, a, n) for a, n in zip(starts, sizes, strict=True)]


# Each op, and the same views taken one by one, which torch lets a program write into.
OPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "unbind": (lambda x: x.unbind(1), lambda x: [x.select(1, i) for i in range(4)]),
    "split": (lambda x: x.split(4), _cut(0, 4, 2)),
    "hsplit": (lambda x: x.hsplit(2), _cut(1, 2, 2)),
    "unsafe_chunk": (lambda x: x.unsafe_chunk(2), _cut(0, 3, 3)),
    "iteration": (list, lambda x: [x.select(0, i) for i in range(6)]),
    "split_with_sizes": (lambda x: x.split_with_sizes([1, 3], 1), _cut(1, 1, 3)),
    "chunk": (lambda x: x.chunk(2), _cut(0, 3, 3)),
    "tensor_split": (lambda x: x.tensor_split(3), _cut(0, 2, 2, 2)),
    "vsplit": (lambda x: x.vsplit([2]), _cut(0, 2, 4)),
    "dsplit": (lambda x: x.dsplit(2), _cut(2, 1, 1)),
    "unsafe_split": (lambda x: x.unsafe_split(4), _cut(0, 4, 2)),
    "unsafe_split_with_sizes": (lambda x: x.unsafe_split_with_sizes([1, 3], 1), _cut(1, 1, 3)),
}
MODES: dict[str, tuple[Callable[[], Any], ...]] = {
    "grad": (),
    "no_grad": (torch.no_grad,),
    "inference": (torch.inference_mode,),
    "enable_grad in no_grad": (torch.no_grad, torch.enable_grad),
    "enable_grad in inference": (torch.inference_mode, torch.enable_grad),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "setitem": lambda x: x.__setitem__(..., 3.0),
    "a list op": lambda x: torch._foreach_mul_([x], 2.0),
    "copy_": lambda x: x.copy_(x.detach().clone() * 2),
}
TARGETS = ("view", "part", "other", "source")  # what is written into


@dataclass(frozen=True)
class Case:
    """``recorded``: the source has a graph; ``taken``, ``written``: the modes in which views are
    taken and written."""

    recorded: bool
    taken: str
    written: str
    target: str
    write: str


def _cases() -> Iterator[Case]:
    sources, writes = ((True, False), list(WRITES)) if ALL else ((True,), ["add_"])
    modes = list(MODES) if ALL else list(MODES)[:3]
    for case in itertools.product(sources, modes, modes, TARGETS, writes):
        yield Case(*case)


def _program(made: Callable[[], Any], take: Callable[[Any], Any], case: Case) -> dict[str, Any]:
    """What each step of the program gives, or "raised"."""
    found: dict[str, Any] = {}
    leaf = made().requires_grad_()
    source = leaf * 1.0 if case.recorded else leaf.detach().clone()
    tensors = {"source": source, "before": source.view(-1)}

    def step(name: str, run: Callable[[], Any], mode: str = "grad") -> None:
        try:
            with ExitStack() as stack:
                for enter in MODES[mode]:
                    stack.enter_context(enter())
                out = run()
        except RuntimeError:
            found[name] = "raised"
        else:
            found[name] = (out.full() if hasattr(out, "full") else out).detach().clone()

    def views() -> Any:
        tensors["other"], tensors["view"] = take(source)[:2]
        tensors["part"] = tensors["view"][:1]
        return tensors["part"]

    def gradient(x: Any) -> Any:
        leaf.grad = None
        x.square().sum().backward(retain_graph=True)
        return torch.zeros(0) if leaf.grad is None else leaf.grad

    def write() -> Any:
        WRITES[case.write](tensors[case.target])
        return torch.zeros(0)

    step("take", views, case.taken)
    step("write", write, case.written)
    for name, x in tensors.items():
        step(f"{name} detached", x.detach)
        step(f"{name} without a gradient", lambda x=x: x * 2, "no_grad")
    for name, x in tensors.items():
        step(f"{name} used", lambda x=x: x * 2)
    for name, x in tensors.items():
        step(f"gradient of {name}", lambda x=x: gradient(x))
    return found


def _differences(rank: int, ranks: int, op: str) -> list[tuple[Any, ...]]:
    """Steps that give something else than plain torch. Where torch has refused, the views may be
    what they are if they are taken one by one, or be refused as well."""
    placement, wrong = Placement("cpu", range(ranks)), []
    several, one_by_one = OPS[op]
    for case in _cases():
        wanted = _program(W.clone, several, case)
        allowed = _program(W.clone, one_by_one, case)
        for entry in (S(0), S(1), S(2), B) if ALL else (S(0), S(1)):
            given = _program(lambda e=entry: distribute(W.clone(), placement, e), several, case)
            if op.startswith("unsafe_") and _raised(given["write"]):
                continue  # torch leaves it to the program what gradient that has
            has_refused = False
            for name, value in given.items():
                has_refused = has_refused or _raised(wanted[name])
                right = _same(value, wanted[name])
                if has_refused:
                    right = right or _raised(value) or _same(value, allowed[name])
                    right = right or _is_read(name, value, wanted)
                if not right:
                    wrong.append((op, case, str(entry), name, value, wanted[name]))
    return wrong


def _is_read(name: str, value: Any, wanted: dict[str, Any]) -> bool:
    """A view that was taken without a gradient is read where torch knows no gradient: by value."""
    before: Any = wanted.get(name.replace("used", "detached"), "raised")
    return name.endswith("used") and not _raised(before) and _same(value, before * 2)


def _raised(x: Any) -> bool:
    return isinstance(x, str)


def _same(a: Any, b: Any) -> bool:
    if _raised(a) or _raised(b):
        return _raised(a) and _raised(b)
    return a.shape == b.shape and torch.allclose(a, b, 1e-12, 0.0)


@pytest.mark.parametrize("op", OPS if ALL else list(OPS)[:4])
@pytest.mark.parametrize("ranks", [2, 3] if ALL else [2])
def test_each_of_several_views_is_written_as_in_plain_torch(ranks: int, op: str) -> None:
    found = pool(ranks).run(_differences, ranks, op, timeout=600)
    assert [len(each) for each in found] == [0] * ranks, found[0][:5]
