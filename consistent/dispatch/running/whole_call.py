"""User code that torch calls as one op: a ``torch.autograd.Function``, a scripted function, a
custom op.

It has no rule and may read anything, so every rank runs it on whole plain tensors. Its backward is
not known to be linear in the gradient, so backward gets whole gradients, too:

```
forward    x: S  --gather-->  whole  --the call-->  whole  --spread-->  y: B
backward   dx: S  <--slice--  whole  <--the call--  whole  <--sum over ranks--  dy: P
```

What it writes in place lands in the tensors that it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mirrored.transports.default import current

from ...movement import check_mode, plain_values
from ...movement.differentiable import gather, land, spread
from ...movement.world import my_coordinate
from ...rules.signature import Call, Operand
from ...spec import B, Layout, Placement, TensorSpec
from ..plans.arguments import collect, with_tensors
from ..plans.plan import listeners, observers, starters, watchers
from ..plans.shards import adopt, attach, common_placement, is_global, plain
from .moved_views import fresh
from .on_shards import OnShards
from .outside_ranks import announced, map_values

_Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Given:
    """In a result: the operand of that index itself."""

    index: int


def call_whole(name: str, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """``run(*args, **kwargs)`` on whole tensors; the tensors that come out are B."""
    given: list[Any] = []
    collect((args, kwargs), given)
    placement = common_placement(name, given)
    check_mode.calling(name)
    plan = _plan(name, run, given, placement)
    for start in starters:
        start(plan)
    met = [x for x in given if not is_global(x)]
    plain_values.compare(name, met, placement, (name, *((x.dtype, x.ndim) for x in met)))
    sources = [fresh(adopt(x, placement, name)) if plan.outside else fresh(x) for x in given]

    def call() -> tuple:
        return _run(run, args, kwargs, sources)

    if placement.size < current().size:
        follow = announced(placement.first_rank, plan.outside)
        out, written = follow(call, [plain(x) for x in sources])
    else:
        out, written = call()
    for index, whole in written:
        _put_back(given[index], whole)
    specs: list[TensorSpec] = []
    result = _typed(out, plan, given, specs)
    for observe in observers:
        observe(plan, [x._spec for x in given if is_global(x)], specs)
    for listen in listeners:
        listen(plan, [x for x in given if is_global(x)], result)
    return result


def _plan(name: str, run: Callable[..., Any], given: list, placement: Placement) -> OnShards:
    """What is done, for those who watch plans."""
    specs = [x._spec for x in given if is_global(x)]
    call = Call(name, (), {}, tuple(Operand(i, spec) for i, spec in enumerate(specs)))
    plan, whole = OnShards(name, run, call, placement), Layout.whole(placement)
    plan.boxes = tuple((i, whole) for i, spec in enumerate(specs) if spec.layout is not whole)
    plan.outside = my_coordinate(placement) is None
    for watch in watchers:
        watch(plan)
    return plan


def _run(run: Callable[..., Any], args: tuple, kwargs: dict, sources: list) -> tuple:
    """What the call returns, and (operand, whole value) of each operand that it wrote to."""
    whole = [_whole(x) for x in sources]
    before = [_writes(x) for x in whole]
    args, kwargs = with_tensors(args, kwargs, whole)
    out = run(*args, **kwargs)
    written = tuple((i, x) for i, x in enumerate(whole) if _writes(x) != before[i])
    places = {id(x): _Given(i) for i, x in enumerate(whole)}
    return map_values(out, _Tensor, lambda x: places.get(id(x), x)), written


def _whole(x: Any) -> torch.Tensor:
    if not is_global(x):
        return x
    if not torch.is_inference_mode_enabled():
        return gather(x, x._spec)
    with torch.inference_mode(False), torch.no_grad():  # tensors made in it count no writes
        return gather(x, x._spec)


def _writes(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _put_back(x: Any, whole: torch.Tensor) -> None:
    """Write ``whole``, the written value of ``x``, into ``x``. A plain ``x`` was written itself."""
    if not is_global(x):
        return
    if x._moved_view:
        spec = _everywhere(x._spec.placement, whole)
        x.copy_(attach(spread(whole, spec, alias=True), spec))
    else:
        land(x, whole, x._spec)


def _everywhere(placement: Placement, x: torch.Tensor) -> TensorSpec:
    return TensorSpec.of(placement, (B,) * placement.ndim, x.shape, x.dtype)


def _typed(out: Any, plan: OnShards, given: list, specs: list[TensorSpec]) -> Any:
    """``out`` with its tensors made global, and each ``_Given`` replaced by its operand."""

    def typed(x: torch.Tensor) -> Any:
        if x.__class__ is not _Tensor:
            return x
        spec = _everywhere(plan.placement, x)
        specs.append(spec)
        tracked = torch.is_grad_enabled() and x.requires_grad and not plan.outside
        return attach(spread(x, spec, alias=True) if tracked else x, spec)

    out = map_values(out, _Tensor, typed)
    return map_values(out, _Given, lambda place: given[place.index])
