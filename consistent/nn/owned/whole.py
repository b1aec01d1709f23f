"""Run one optimizer step on whole matrices, which are plain tensors on their owners.

```
zero3        rank 0 owns w          rank 1 owns v
before       w[:4]  v[:4]           w[4:]  v[4:]         shards, and those of gradients
   one exchange                     w[4:] --> rank 0, v[:4] --> rank 1
step         w      v.grad = None   v      w.grad = None
   one exchange                     new w[4:] --> rank 1, new v[:4] --> rank 0
after        w[:4]  v[:4]           w[4:]  v[4:]
```

A parameter that another rank owns has no gradient during the step, so the optimizer skips it. Only
pieces that a rank does not have are sent to it. Shards are not changed before all owners have
stepped, so an error leaves the old values on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrored.transports.default import current

from ...dispatch import _C
from ...dispatch.plans import gradients
from ...dispatch.plans.shards import HookOff, attach, plain
from ...dispatch.running.agreed import ranks_of
from ...movement import check_mode
from ...movement.run import begin_boxing, notify_end, run
from ...movement.run_exchanges import run_exchanges
from ...movement.several import Route
from ...movement.world import device_of, my_coordinate
from ...spec import Placement, TensorSpec
from ...tensor.storage.step_layout import OwnedState, owned_spec
from ..sharded.master_weights import masters_of
from .owners import is_this_rank

_Base: Any = torch.Tensor


class WholeStep:
    """One step of an optimizer on whole matrices, each on the rank that owns it.

    Making an instance sends all parameters that have a gradient to their owners; ``finish`` sends
    the new values back.

    Args:
        optimizer: the optimizer.
        owned: (parameter, placement of its owner) of all parameters that it steps whole.

    Attributes:
        ranks: all ranks that have a shard of one of these parameters.
    """

    def __init__(self, optimizer: Any, owned: Sequence[tuple[Any, Placement]]) -> None:
        self._optimizer = optimizer
        self._masters = masters_of(optimizer)
        params_and_grads = [(p, owner, gradients.raw_grad(p)) for p, owner in owned]
        self._items = [
            _SteppedParameter(p, owner, grad)
            for p, owner, grad in params_and_grads
            if grad is not None
        ]
        self.ranks = tuple(
            sorted({rank for p, _, _ in params_and_grads for rank in ranks_of(p._spec.placement)})
        )
        wholes = _exchange([box for item in self._items for box in item.boxes()])
        for item, whole, grad in zip(self._items, wholes[::2], wholes[1::2], strict=True):
            item.enter_step(whole, grad, self._masters)

    def has_shards(self) -> bool:
        """Return whether this rank has a shard of a parameter that is stepped whole."""
        return current().rank in self.ranks

    def finish(self) -> None:
        """End the step: send the new values back, and restore the parameters' layouts."""
        values = [item.value() for item in self._items]
        self.restore()
        routes = [(item.owner_spec, item.spec) for item in self._items]
        into = [item.shard for item in self._items]
        _exchange(list(zip(values, routes, strict=True)), into)
        for item in self._items:
            if self._masters is not None:
                self._masters.mark_current(item.param)

    def restore(self) -> None:
        """Restore layouts, values and gradients from before the step, without communication.

        Used after an error, since shards are not changed before ``finish``.
        """
        for item in self._items:
            item.leave_step()
            state = self._optimizer.state.get(item.param)
            # The optimizer may have replaced the OwnedState by a new dict.
            if item.is_owned_here and not isinstance(state, OwnedState):
                self._optimizer.state[item.param] = OwnedState(dict(state or {}), item.owner)


class _SteppedParameter:
    """One parameter in a ``WholeStep``, with its shard and gradient from before the step.

    Args:
        param: the parameter.
        owner: the placement of the one rank that steps it.
        grad: its gradient.
    """

    def __init__(self, param: Any, owner: Placement, grad: Any) -> None:
        self.param, self.owner, self.grad = param, owner, grad
        self.spec: TensorSpec = param._spec
        self.shard = plain(param).detach()
        self.owner_spec = owned_spec(owner, self.spec.shape, self.spec.dtype)
        self.is_owned_here = is_this_rank(owner)
        self.master: Tensor | None = None

    def boxes(self) -> list[tuple[Tensor, Route]]:
        """Return what is sent to the owner: (shard, route) of the parameter, and of its gradient.

        A route is (spec from which, spec to which) the tensor is redistributed.

        Raises:
            TypeError: the gradient is sparse.
        """
        local, spec = plain(self.grad).detach(), self.grad._spec
        if local.is_sparse:
            raise TypeError(
                f"matrix_step: a parameter of shape {tuple(self.spec.shape)} has a sparse "
                "gradient, and its owner steps it whole. Step it by an optimizer of its own, "
                "such as torch.optim.SparseAdam, or make the module with sparse=False."
            )
        if any(entry.is_partial for entry in spec.sbp):  # accumulated inside no_sync()
            settled = gradients.settled_spec(self.param).with_dtype(spec.dtype)
            local, spec = run(local, spec, settled), settled
        grad_spec = self.owner_spec.with_dtype(spec.dtype)
        return [(self.shard, (self.spec, self.owner_spec)), (local, (spec, grad_spec))]

    def enter_step(self, whole: Tensor, grad: Tensor, masters: Any) -> None:
        """Prepare the parameter for the step, in which only its owner has a value and a gradient.

        Args:
            whole: on the owner, the whole matrix, which becomes the parameter's data.
            grad: on the owner, its whole gradient. On other ranks the gradient is None.
            masters: the optimizer's float32 copies; None without them. With them, the optimizer
                steps a clone of the copy in place of ``whole``.
        """
        if masters is not None:
            self.master = master = masters.copy_of(self.param, whole, self.owner_spec)
            whole = master.clone()  # the master copy must survive an error in the step
        gradients.set_raw_grad(self.param, None)
        self.param.__dict__["_in_step"] = self
        if self.is_owned_here:
            with HookOff():
                _Base.data.__set__(self.param, whole)
            self.param.__class__ = nn.Parameter
            _C.set_gradient(self.param, grad.to(whole.dtype))

    def value(self) -> Tensor:
        """Return the value after the step: the whole matrix on its owner, else a meta tensor."""
        if not self.is_owned_here:
            return torch.empty(self.spec.shape, dtype=self.spec.dtype, device="meta")
        stepped = _Base.detach(self.param)
        if self.master is not None:
            self.master.copy_(stepped)
        return stepped.to(self.spec.dtype)

    def leave_step(self) -> None:
        """Restore the parameter's shard and its gradient from before the step."""
        if self.is_owned_here:
            _C.set_gradient(self.param, None)
            with HookOff():
                _Base.data.__set__(self.param, self.shard)
        self.param.__dict__.pop("_in_step", None)
        _C.set_gradient(self.param, self.grad)
        attach(self.param, self.spec)


def _exchange(
    boxes: Sequence[tuple[Tensor, Route]], into: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Send tensors from their shards to the owners or back, with one exchange for each placement.

    Args:
        boxes: (local tensor, route) of each; a route is (present spec, target spec).
        into: the tensors to fill; by default new ones.

    Returns:
        the filled tensors.
    """
    outputs = [_empty_local(dst) for _, (_, dst) in boxes] if into is None else list(into)
    check_mode.set_current_op("matrix_step")
    with torch.no_grad(), HookOff():
        local_routes = [(begin_boxing(x, *route)[0], route) for x, route in boxes]
        groups: dict[Placement, list[int]] = {}
        for i, (_, (src, dst)) in enumerate(local_routes):
            # One of the two is the single owner; the other one's ranks take part in the exchange.
            larger = src if src.placement.size >= dst.placement.size else dst
            groups.setdefault(larger.placement, []).append(i)
        for indices in groups.values():
            locals_, routes = zip(*(local_routes[i] for i in indices), strict=True)
            run_exchanges(locals_, routes, [outputs[i] for i in indices])
    notify_end(*(route for _, route in local_routes))
    return outputs


def _empty_local(spec: TensorSpec) -> Tensor:
    """Return an uninitialized local tensor for ``spec``; a meta tensor outside its placement."""
    at = my_coordinate(spec.placement)
    device = "meta" if at is None else device_of(spec.placement)
    return torch.empty(spec.local_shape(at), dtype=spec.dtype, device=device)
