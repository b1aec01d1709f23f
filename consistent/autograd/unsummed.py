"""Gradients, inside ``no_sync()``, of sharded leaves that are gathered for use, as by ZeRO-3.

Inside the context nothing is sent, and ``.grad`` is a P tensor, on each rank as large as the
gathered leaf.

```
inside     .grad: P + this rank's addend              nothing is sent
after it   .grad: P + this rank's addend -> S(0)      one reduce-scatter of all that was added
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..dispatch import _C
from ..dispatch.plans.gradients import set_raw_grad, settled_spec, summed_axes
from ..dispatch.plans.shards import HookOff, attach, plain, replace_shard
from ..movement.coded import Coders
from ..movement.grad_mode import is_accumulated
from ..movement.run import run
from ..movement.several import overlap_flags
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from . import scattering
from .leaves import watch_leaf
from .shown import hide


def take_over_gradients(
    nodes: Sequence[Any],
    grads: Sequence[Tensor | None],
    specs: Sequence[TensorSpec],
    keep: bool = True,
    coders: Coders = (),
) -> list[Tensor | None]:
    """Take over gradients on their way to sharded leaves; return those still to be boxed.

    ``boxed.box_several`` calls it in backward (its argument ``arriving``). A gradient that is taken
    over is None in the result:

    * Inside ``no_sync()`` it is added to ``.grad``, which is P, and nothing is sent.
    * Otherwise it goes in a bucket if its message can overlap with the rest of backward. What
      ``no_sync()`` has accumulated in ``.grad`` is added to it first.

    Args:
        nodes: the autograd node that each gradient goes to.
        grads: this rank's shards of the gradients.
        specs: the specs of the gradients.
        keep: whether to take gradients over inside ``no_sync()``; else they are returned to be
            boxed even there.
        coders: the codecs by which they are sent; empty if there are none.
    """
    remaining, candidates = list(grads), []
    for i, (node, grad, spec) in enumerate(zip(nodes, grads, specs, strict=True)):
        leaf = getattr(node, "variable", None)
        if leaf is None or grad is None or not is_accumulated(node):
            continue
        spec = spec.with_dtype(grad.dtype)
        hide(leaf)
        held_grad = _C.held_gradient(leaf)
        if _C.is_synced():
            # A hook of the leaf must see only the gradient of this backward, in the leaf's layout.
            if held_grad is not None and held_grad._spec is spec and not leaf._backward_hooks:
                remaining[i] = scattering.add_gradients(plain(held_grad), grad)
                _zero_gradient(leaf, held_grad)
            if _can_defer(leaf, remaining[i]):
                target = leaf._spec.dual.with_dtype(spec.dtype)
                candidates.append((i, leaf, remaining[i], (spec, target)))
        elif keep and not leaf._backward_hooks:
            _accumulate_partial(leaf, held_grad, grad, spec)
            remaining[i] = None
    travels = overlap_flags([route for *_, route in candidates])
    deferred = [each for each, travels_too in zip(candidates, travels, strict=True) if travels_too]
    if deferred:
        positions, leaves, deferred_grads, routes = zip(*deferred, strict=True)
        for i in positions:
            remaining[i] = None
        scattering.defer_gradients(
            leaves, deferred_grads, routes, [coders[i] for i in positions] if coders else ()
        )
    return remaining


def _can_defer(leaf: Any, grad: Any) -> bool:
    """Return whether ``grad`` may go in a bucket, to be added at the end of backward."""
    # Hooks, and sums over further axes, need the gradient boxed to the leaf's layout first.
    if leaf._backward_hooks or summed_axes(leaf._spec):
        return False
    return scattering.can_defer(leaf, grad)


def _accumulate_partial(leaf: Any, held_grad: Any, grad: Tensor, spec: TensorSpec) -> None:
    """Add ``grad`` to ``leaf.grad`` without communication, so that ``.grad`` becomes P.

    ``held_grad`` is the present ``.grad`` or None, and ``spec`` the spec of ``grad``.
    """
    if held_grad is None:
        total = grad.detach().clone()
    elif held_grad._spec is spec:
        total = scattering.add_gradients(plain(held_grad), grad)
    else:
        total = scattering.add_gradients(
            run(plain(held_grad).detach(), held_grad._spec, spec), grad
        )
    if held_grad is None or not scattering.is_dense(held_grad, total):
        set_raw_grad(leaf, attach(total, spec))
        watch_leaf(leaf)
    elif held_grad._spec is not spec:  # keep the object, since the program may refer to it
        replace_shard(held_grad, total, spec)
        watch_leaf(leaf)
    # Torch does not see this addition, so it does not call these hooks.
    for hook in tuple((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


def _zero_gradient(leaf: Any, held_grad: Any) -> None:
    """Set ``held_grad``, which is ``leaf.grad``, to zeros in the layout that it has after backward.

    The object stays the same. Its former value has been added to a gradient that is still to be
    summed over ranks, and will come back with that.
    """
    settled = settled_spec(leaf).with_dtype(held_grad.dtype)
    coordinate = my_coordinate(settled.placement)
    if coordinate is None or not scattering.is_dense(held_grad):
        set_raw_grad(leaf, None)
    else:
        with HookOff():
            zeros = plain(held_grad).new_zeros(settled.local_shape(coordinate))
        replace_shard(held_grad, zeros, settled)
    watch_leaf(leaf)
