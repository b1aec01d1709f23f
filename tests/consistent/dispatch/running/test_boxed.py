"""Plans that box operands first: the hook puts these in their places, and so does Python where it
runs the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import consistent
from consistent import B, P, S
from consistent.dispatch.plans.plan import BOXED, Plan
from consistent.report import report
from consistent.spec.tracer import Tracer
from tests.ranks import on_ranks

# An addend, or a part, meets what is whole: in front, behind, by name, several times, in a list,
# written into, and with a number between.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "in front": lambda p, b: p + b,
    "behind": lambda p, b: b + p,
    "by name": lambda p, b: torch.add(b, other=p, alpha=2.0),
    "twice": lambda p, b: torch.mul(p, p),
    "three operands": lambda p, b: torch.addcmul(b, p, p, value=0.5),
    "in a list": lambda p, b: torch.cat([b, p, b]),
    "several results": lambda p, b: torch.max(p * 1.0, dim=1),
    "an order": lambda p, b: torch.sort(p, dim=0).values,
    "into": lambda p, b: (b * 1.0).add_(p),
    "a choice": lambda p, b: torch.where(b > 0, p, b),
    "a reduction": lambda p, b: torch.linalg.vector_norm(p),
    "a number": lambda p, b: torch.clamp(p, min=0.25),
}


def _step(call: Any, p: Any, b: Any) -> list[Any]:
    p, b = p.detach().requires_grad_(), b.detach().requires_grad_()
    out = _first(call(p, b))
    grads = torch.autograd.grad((out * out).sum(), [p, b], allow_unused=True)
    with torch.no_grad():  # nothing is recorded here, which is another way through boxing
        again = _first(call(p, b))
    return [out, again, *(g for g in grads if g is not None)]


def _first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


def _whole(x: Any) -> torch.Tensor:
    return x.full() if isinstance(x, consistent.GlobalTensor) else x.detach()


@on_ranks(2, 3)
def test_values_and_gradients_are_torchs(rank: int) -> None:
    everywhere = consistent.placement.all("cpu")
    torch.manual_seed(0)
    p, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    for name, call in CALLS.items():
        wanted = _step(call, p, b)
        for layouts in ((P, B), (S(0), P), (P, S(1)), (S(1), S(0))):
            laid = [
                consistent.distribute(x, everywhere, sbp)
                for x, sbp in zip((p, b), layouts, strict=True)
            ]
            for turn in range(2):
                for a, z in zip(_step(call, *laid), wanted, strict=True):
                    torch.testing.assert_close(_whole(a), _whole(z), msg=f"{name} {layouts} {turn}")


@on_ranks(2)
def test_the_hook_puts_boxed_operands_in(rank: int) -> None:
    everywhere = consistent.placement.all("cpu")
    p = consistent.distribute(torch.ones(4, 3), everywhere, P)
    made: list[Plan] = []
    with Tracer(on_plan=made.append).tracing():
        wanted = torch.mul(p, p).full()
        with report() as seen:  # then Python runs the plan
            in_python = torch.mul(p, p)
    assert [plan.way for plan in made if plan.name == "mul"] == [BOXED]
    assert torch.equal(wanted, in_python.full())
    assert any(line.op == "mul" for line in seen.lines)
