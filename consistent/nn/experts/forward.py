"""Run the forward of a module of experts on the ranks that hold each token's experts.

```
                          rank 0                  rank 1
given                     tokens of its batch     tokens of its batch       global, S(0)
sent                      rows of experts 0, 1    rows of experts 2, 3      plain
the module's own forward  on weights [2, ...]     on weights [2, ...]       plain
sent back, weighted       tokens of its batch     tokens of its batch       global, S(0)
```

The number of rows that a rank receives depends on values, but the spec of a global tensor must be
known in advance. The rows between sending and returning are therefore plain tensors: the module's
own code runs on them as if this rank's experts were the only ones. Each row is passed with one
expert, with weight 1. A token's weights are applied on the rank that it came from, so neither the
weights nor their gradients are sent.

If another axis splits the weights inside each expert, the ranks that differ along it have the same
tokens, and send and receive the same rows. The module's own forward then runs on these rows as
global tensors on these ranks only, with the weights split in the layout that they have.

If tokens are replicated along an axis of the experts, the call runs op by op instead: each rank has
all rows and multiplies those of its experts.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from mirrored.transports.default import current

from ...dispatch.plans.shards import is_global
from ...dispatch.running.agreed import ranks_of
from ...movement import check_mode
from ...movement.world import excludes_others, my_coordinate
from ...spec import B, Placement, Split, TensorSpec
from .exchange import Owners
from .replaced import ReplacedForward
from .routed import RoutedStacks, run_routed

# A number means the same module on all ranks: they parallelize modules in the same order.
_forward_numbers = itertools.count()


class ExpertsForward(ReplacedForward):
    """Forward of a module of experts that sends each token to the ranks that hold its experts.

    It replaces the module's ``forward(tokens, index, weights)``, which it runs on the tokens that
    arrive. If layouts do not allow that, the module's forward runs as it is, on global tensors.

    Args:
        module: the module of experts.
        axes: the axes of its tensors' placement along which its experts are divided.
        inside: the axes along which some of its tensors are split inside each expert.
    """

    def __init__(
        self, module: nn.Module, axes: tuple[int, ...], inside: tuple[int, ...] = ()
    ) -> None:
        super().__init__(module)
        self.axes, self.inside = axes, inside
        self.number = next(_forward_numbers)
        self.names = tuple(inspect.signature(module.forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self.names, args)) | kwargs
        inputs = [arguments.get(name) for name in self.names[:3]]
        spec = self._spec_to_send(*inputs) if len(arguments) == 3 else None
        if spec is None:
            return self._reduce_partial_sums(self.original_forward(*args, **kwargs))
        check_mode.set_current_op("experts")
        stacks = self._module_tensors()
        count, at = next(iter(stacks.values())).shape[0], my_coordinate(spec.placement)
        assert at is not None
        boxed_inputs = [each.to_global(sbp=spec.sbp) for each in inputs]  # type: ignore[union-attr]
        local = [each.to_local() for each in (*boxed_inputs, *stacks.values())]
        specs = tuple(
            self._spec_of_own_experts(each._spec, at) for each in stacks.values() if self.inside
        )
        assignment = expert_owners(spec.placement, self.axes, count, at)
        return run_routed(RoutedStacks(assignment, self, tuple(stacks), specs), local, spec)

    def _spec_of_own_experts(self, spec: TensorSpec, at: tuple[int, ...]) -> TensorSpec:
        """Return the spec of this rank's experts, on the ranks that hold the same experts.

        Each of these ranks has a shard of each expert. Their coordinates differ from this rank's
        only along the axes ``inside``.

        Args:
            spec: the spec of a stack of weights on the whole placement.
            at: this rank's coordinate in that placement.
        """
        local = spec.local_shape(at)
        placement = _placement_along(spec.placement, self.inside, at)
        entries = tuple(spec.sbp[axis] for axis in self.inside)
        return TensorSpec.of(placement, entries, (local[0], *spec.shape[1:]), spec.dtype)

    def _reduce_partial_sums(self, out: Any) -> Any:
        """Return ``out`` with partial sums along the experts' axes reduced to B.

        Otherwise the next layers might run on shards of it, which would then be redistributed.
        """
        if not is_global(out):
            return out
        sbp = tuple(
            B if axis in self.axes and entry.is_partial else entry
            for axis, entry in enumerate(out._spec.sbp)
        )
        return out.to_global(sbp=sbp)

    def _spec_to_send(self, x: Any, index: Any, weights: Any) -> TensorSpec | None:
        """Return the spec to which tokens, index and weights are redistributed before sending.

        None if tokens cannot be sent; the module's forward then runs op by op on global tensors.
        """
        tensors = [x, index, weights, *self._module_tensors().values()]
        if not all(map(is_global, tensors)) or index.is_floating_point():
            return None
        lead = index.ndim - 1
        if index.shape != weights.shape or index.shape[:-1] != x.shape[:-1] or lead == 0:
            return None
        return spec_to_send(tensors, lead, self.axes, self.inside)

    def _module_tensors(self) -> dict[str, Any]:
        """Return the module's tensors in the layout in which forward sees them, by name."""
        keys = self.module._parameters
        return {key: getattr(self.module, key) for key in keys if keys[key] is not None}


def spec_to_send(
    tensors: Sequence[Any], lead: int, axes: Collection[int], inside: Collection[int] = ()
) -> TensorSpec | None:
    """Return the spec to which tokens are redistributed before they are sent to their experts.

    None if they are not sent: the tokens are not split along all axes of the experts, or tensors
    are on several placements, or ranks outside the placement run the program, too. The result
    depends only on specs, so it is the same on all ranks.

    Args:
        tensors: the tokens, their choices of experts, and the experts' tensors; global tensors.
        lead: the number of dims of the tokens before their features.
        axes: the axes along which the experts are divided.
        inside: the axes along which each expert is split.
    """
    spec = tensors[0]._spec
    if any(each._spec.placement != spec.placement for each in tensors):
        return None
    if spec.placement.size != current().size and not excludes_others():
        return None  # ranks outside the placement infer the result by following the ops
    split = [isinstance(entry, Split) and entry.dim < lead for entry in spec.sbp]
    split = [each and axis not in inside for axis, each in enumerate(split)]
    wide_axes = [axis for axis in axes if spec.placement.shape[axis] > 1]
    if not wide_axes or not all(split[axis] for axis in wide_axes):
        return None
    return spec.with_sbp(tuple(e if s else B for e, s in zip(spec.sbp, split, strict=True)))


@lru_cache(maxsize=1 << 10)
def _placement_along(placement: Placement, axes: tuple[int, ...], at: tuple[int, ...]) -> Placement:
    """Return the placement of the ranks whose coordinate differs from ``at`` only on ``axes``."""
    index = tuple(slice(None) if axis in axes else at[axis] for axis in range(placement.ndim))
    return Placement(placement.type, placement.ranks[index].tolist())


@lru_cache(maxsize=1 << 10)
def expert_owners(
    placement: Placement, axes: tuple[int, ...], count: int, at: tuple[int, ...]
) -> Owners:
    """Return which rank holds how many of ``count`` experts, in one group of ranks.

    A group holds all experts. Its ranks differ only along ``axes``: on a placement [2, 4] whose
    axis 1 divides the experts, there are 2 groups of 4 ranks. The group is that of the rank with
    coordinate ``at``.
    """
    entries = tuple(Split(0) if axis in axes else B for axis in range(placement.ndim))
    spec = TensorSpec.of(placement, entries, (count,), torch.int64)
    ranges = (range(n) if axis in axes else [at[axis]] for axis, n in enumerate(placement.shape))
    coordinates = list(itertools.product(*ranges))
    ranks = tuple(placement.rank_at(coordinate) for coordinate in coordinates)
    sizes = tuple(spec.local_shape(coordinate)[0] for coordinate in coordinates)
    return Owners(ranks, coordinates.index(at), sizes, ranks_of(placement))
