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
from ..dispatch.plans.shards import HookOff, attach, lay_anew, plain
from ..movement.coded import Coders
from ..movement.grad_mode import is_accumulated
from ..movement.run import run
from ..movement.several import which_travel
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from . import scattering
from .leaves import watch_leaf
from .shown import hide


def arriving(
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
    left, candidates = list(grads), []
    for i, (node, grad, spec) in enumerate(zip(nodes, grads, specs, strict=True)):
        leaf = getattr(node, "variable", None)
        if leaf is None or grad is None or not is_accumulated(node):
            continue
        spec = spec.with_dtype(grad.dtype)
        hide(leaf)
        held = _C.held_gradient(leaf)
        if _C.is_synced():
            # A hook of the leaf must see only the gradient of this backward, in the leaf's layout.
            if held is not None and held._spec is spec and not leaf._backward_hooks:
                left[i] = scattering.added(plain(held), grad)
                _clear(leaf, held)
            if _may_be_later(leaf, left[i]):
                target = leaf._spec.dual.with_dtype(spec.dtype)
                candidates.append((i, leaf, left[i], (spec, target)))
        elif keep and not leaf._backward_hooks:
            _keep(leaf, held, grad, spec)
            left[i] = None
    travels = which_travel([route for *_, route in candidates])
    later = [each for each, travels_too in zip(candidates, travels, strict=True) if travels_too]
    if later:
        positions, leaves, given, routes = zip(*later, strict=True)
        for i in positions:
            left[i] = None
        scattering.add_later(
            leaves, given, routes, [coders[i] for i in positions] if coders else ()
        )
    return left


def _may_be_later(leaf: Any, grad: Any) -> bool:
    """Return whether ``grad`` may go in a bucket, to be added at the end of backward."""
    # Hooks, and sums over further axes, need the gradient boxed to the leaf's layout first.
    if leaf._backward_hooks or summed_axes(leaf._spec):
        return False
    return scattering.may_be_later(leaf, grad)


def _keep(leaf: Any, held: Any, grad: Tensor, spec: TensorSpec) -> None:
    """Add ``grad`` to ``leaf.grad`` without communication, so that ``.grad`` becomes P.

    ``held`` is the present ``.grad`` or None, and ``spec`` the spec of ``grad``.
    """
    if held is None:
        total = grad.detach().clone()
    elif held._spec is spec:
        total = scattering.added(plain(held), grad)
    else:
        total = scattering.added(run(plain(held).detach(), held._spec, spec), grad)
    if held is None or not scattering.is_dense(held, total):
        set_raw_grad(leaf, attach(total, spec))
        watch_leaf(leaf)
    elif held._spec is not spec:  # keep the object, since the program may refer to it
        lay_anew(held, total, spec)
        watch_leaf(leaf)
    # Torch does not see this addition, so it does not call these hooks.
    for hook in tuple((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


def _clear(leaf: Any, held: Any) -> None:
    """Set ``leaf.grad``, the tensor ``held``, to zeros in the layout that it has after backward.

    The object stays the same. Its former value has been added to a gradient that is still to be
    summed over ranks, and will come back with that.
    """
    settled = settled_spec(leaf).with_dtype(held.dtype)
    at = my_coordinate(settled.placement)
    if at is None or not scattering.is_dense(held):
        set_raw_grad(leaf, None)
    else:
        with HookOff():
            zeros = plain(held).new_zeros(settled.local_shape(at))
        lay_anew(held, zeros, settled)
    watch_leaf(leaf)
