"""A training step beside itself as a program: the same losses, parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import consistent

Made = tuple[Callable[..., Any], list[Any]]  # a step, and what it changes


def beside(
    make: Callable[[], Made],
    batches: list[tuple],
    backend: str = "ops",
    after: Callable[[list[Any]], None] = lambda changed: None,
    rtol: float = 1e-8,
    **how: Any,
) -> Any:
    """Call the step that ``make`` gives with each batch, eagerly and as a program; after each call,
    ``after`` is given what the step changes. ``rtol`` is for float64; a step in float32 says what
    its roundings allow (tests/rounding.py).

    Raises:
        AssertionError: results, or what the step changes, are not the same after a call.
    """
    torch.manual_seed(3)
    eager, changed = make()
    wanted = []
    for batch in batches:
        result = eager(*batch)
        wanted.append((_values(result), [_values(x) for x in changed]))
        after(changed)
    random = torch.get_rng_state()
    torch.manual_seed(3)
    step, changed = make()
    program = consistent.compile(step, backend=backend, fullgraph=True, **how)
    for i, batch in enumerate(batches):
        found = _values(program(*batch)), [_values(x) for x in changed]
        for ours, theirs in zip(_flat(found), _flat(wanted[i]), strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=rtol, atol=1e-9, msg=lambda m, i=i: f"call {i}: {m}"
            )
        after(changed)
    assert torch.equal(random, torch.get_rng_state()), "another count of random numbers"
    return program


def _values(x: Any) -> Any:
    """What is in ``x``, copied."""
    if isinstance(x, consistent.GlobalTensor):
        return x.full().detach().clone()
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, torch.nn.Module):
        return [(_values(p), _values(p.grad)) for p in x.parameters()], _values(list(x.buffers()))
    if isinstance(x, torch.optim.Optimizer):
        return _values(x.state_dict()["state"])
    if isinstance(x, torch.optim.lr_scheduler.LRScheduler):
        return x.get_last_lr()
    if isinstance(x, dict):
        return [_values(v) for v in x.values()]
    if isinstance(x, list | tuple):
        return [_values(v) for v in x]
    return x


def _flat(x: Any) -> list[Any]:
    if isinstance(x, list | tuple):
        return [leaf for each in x for leaf in _flat(each)]
    return [x]
