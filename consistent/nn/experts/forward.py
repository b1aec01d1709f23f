"""The forward of a module of experts where each token goes to the ranks that have its experts.

```
                          rank 0                  rank 1
given                     tokens of its batch     tokens of its batch       global, S(0)
sent                      rows of experts 0, 1    rows of experts 2, 3      plain
the module's own forward  on weights [2, ...]     on weights [2, ...]       plain
sent back, weighted       tokens of its batch     tokens of its batch       global, S(0)
```

How many rows a rank gets depends on values, and a spec is known to all plans of a program, so the
rows in between are no global tensors: the experts' own code runs on plain ones, as if the rank's
experts were all. It is told that each row has one expert, of weight one. The weights of a token are
multiplied where it came from, so that they are not sent, and neither are their gradients.

Where another axis splits the weights inside each expert, ranks that differ along it have the same
tokens, and send and get the same rows. There the module's own forward runs on these rows as global
tensors of such ranks alone, and its weights are split as they lie.

A call in which tokens are whole along an axis of the experts runs op by op: each rank has all of
the rows then, and multiplies those of its experts.
"""

from __future__ import annotations

import inspect
import itertools
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from mirrored.transports.default import current

from ...dispatch.plans.shards import attach, is_global
from ...dispatch.running.agreed import ranks_of
from ...movement import check_mode
from ...movement.world import is_apart, my_coordinate
from ...spec import B, Placement, Split, TensorSpec
from ..plan import Plan
from .exchange import Owners
from .kinds import takes_routed
from .routed import Routed, in_one_message

_numbers = itertools.count()  # every rank makes the same modules global, in the same order


def install_experts(module: nn.Module, plan: Plan) -> None:
    """Let the modules inside ``module`` whose experts ``plan`` divides send tokens to them."""
    for name, part in module.named_modules():
        if not isinstance(part.__dict__.get("forward"), ExpertsForward) and takes_routed(part):
            axes, inside = _axes([plan.layouts(f"{name}.{key}") for key in part._parameters])
            if axes:
                part.__dict__["forward"] = ExpertsForward(part, axes, inside)


def _axes(found: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which experts are divided, where all tensors of a module are; and those along
    which some are split inside each expert. No axes where one is neither, and not whole."""
    if None in found:
        return (), ()
    axes, inside = list[int](), list[int]()
    for axis, entries in enumerate(zip(*(layouts.use for layouts in found), strict=True)):
        if all(entry == Split(0) for entry in entries):
            axes.append(axis)
        elif any(entry == Split(0) or not (entry is B or entry.is_split) for entry in entries):
            return (), ()
        elif any(entry is not B for entry in entries):
            inside.append(axis)
    return tuple(axes), tuple(inside)


def take_off_experts(module: nn.Module) -> None:
    """Undo ``install_experts``."""
    for part in module.modules():
        found = part.__dict__.get("forward")
        if isinstance(found, ExpertsForward):
            del part.__dict__["forward"]
            if found.inner is not None:
                part.__dict__["forward"] = found.inner


class ExpertsForward:
    """Python finds it before the class's ``forward``, in the module's ``__dict__``. A class, so
    that a module that has it can be copied and pickled.

    Args:
        module: whose forward it is.
        axes: of its tensors' placement, along which its experts are divided.
        inside: those along which some of its tensors are split inside each expert.
    """

    def __init__(
        self, module: nn.Module, axes: tuple[int, ...], inside: tuple[int, ...] = ()
    ) -> None:
        self.module, self.axes, self.inside = module, axes, inside
        self.number = next(_numbers)
        self.inner = module.__dict__.get("forward")
        self.names = tuple(inspect.signature(module.forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args)) | kwargs
        three = [given.get(name) for name in self.names[:3]]
        spec = self._sent_from(*three) if len(given) == 3 else None
        if spec is None:
            return self._added_up(self.own(*args, **kwargs))
        check_mode.calling("experts")
        stacks = self._tensors()
        count, at = next(iter(stacks.values())).shape[0], my_coordinate(spec.placement)
        assert at is not None
        laid = [each.to_global(sbp=spec.sbp) for each in three]  # type: ignore[union-attr]
        local = [each.to_local() for each in (*laid, *stacks.values())]
        specs = tuple(self._on_inside(each._spec, at) for each in stacks.values() if self.inside)
        run = Routed(self, tuple(stacks), owners(spec.placement, self.axes, count, at), specs)
        out = in_one_message(run, local) if current().records else run(*local)
        shape = (*spec.shape[:-1], out.shape[-1])
        return attach(out, TensorSpec.of(spec.placement, spec.sbp, shape, out.dtype))

    def _on_inside(self, spec: TensorSpec, at: tuple[int, ...]) -> TensorSpec:
        """How the experts that are here lie on the ranks that differ from the one at ``at`` in
        ``inside`` only."""
        local = spec.local_shape(at)
        placement = _along(spec.placement, self.inside, at)
        entries = tuple(spec.sbp[axis] for axis in self.inside)
        return TensorSpec.of(placement, entries, (local[0], *spec.shape[1:]), spec.dtype)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _added_up(self, out: Any) -> Any:
        """``out`` without addends along the axes of the experts: the choice op by op would let the
        layers after it run on pieces, and move those."""
        if not is_global(out):
            return out
        sbp = tuple(
            B if axis in self.axes and entry.is_partial else entry
            for axis, entry in enumerate(out._spec.sbp)
        )
        return out.to_global(sbp=sbp)

    def _sent_from(self, x: Any, index: Any, weights: Any) -> TensorSpec | None:
        """How tokens lie where they are sent from; None where they are not to be sent. Specs alone
        decide, which all ranks know."""
        if not all(map(is_global, (x, index, weights, *self._tensors().values()))):
            return None
        spec, lead = x._spec, index.ndim - 1
        fits = index.shape == weights.shape and index.shape[:-1] == x.shape[:-1] and lead > 0
        others = {each._spec.placement for each in (index, weights, *self._tensors().values())}
        if not fits or index.is_floating_point() or others != {spec.placement}:
            return None
        if spec.placement.size != current().size and not is_apart():
            return None  # ranks outside know the result from following the ops
        if self.inside and current().records:
            return None  # what is sent inside could not be told in one message
        split = [isinstance(entry, Split) and entry.dim < lead for entry in spec.sbp]
        split = [each and axis not in self.inside for axis, each in enumerate(split)]
        wide = [axis for axis in self.axes if spec.placement.shape[axis] > 1]
        if not wide or not all(split[axis] for axis in wide):
            return None
        return spec.with_sbp(tuple(e if s else B for e, s in zip(spec.sbp, split, strict=True)))

    def _tensors(self) -> dict[str, Any]:
        """The module's tensors, as forward sees them."""
        keys = self.module._parameters
        return {key: getattr(self.module, key) for key in keys if keys[key] is not None}


@lru_cache(maxsize=1 << 10)
def _along(placement: Placement, axes: tuple[int, ...], at: tuple[int, ...]) -> Placement:
    """The ranks that differ from the one at ``at`` in ``axes`` only."""
    places = tuple(slice(None) if axis in axes else at[axis] for axis in range(placement.ndim))
    return Placement(placement.type, placement.ranks[places].tolist())


@lru_cache(maxsize=1 << 10)
def owners(placement: Placement, axes: tuple[int, ...], count: int, at: tuple[int, ...]) -> Owners:
    """Who has which of ``count`` experts, among the ranks that differ from the one at ``at`` in
    ``axes`` only."""
    entries = tuple(Split(0) if axis in axes else B for axis in range(placement.ndim))
    spec = TensorSpec.of(placement, entries, (count,), torch.int64)
    ways = (range(n) if axis in axes else [at[axis]] for axis, n in enumerate(placement.shape))
    places = list(itertools.product(*ways))
    ranks = tuple(placement.rank_at(place) for place in places)
    sizes = tuple(spec.local_shape(place)[0] for place in places)
    return Owners(ranks, places.index(at), sizes, ranks_of(placement))
