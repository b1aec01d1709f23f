"""Step parameters in another layout than they are stored in (ZeRO-1, ZeRO-2).

```
           before the step      step                        after it
weight     B -> S(0), a view    state is made as S(0) too   S(0) -gather-> B, into the same memory
.grad      B -> S(0), a view                                as it was
```

The parameter itself has the other layout while the step runs. Ops on global tensors are correct in
every layout, so any optimizer makes its state in that layout and computes in it, without changes to
its code. Nothing is sent before the step; after it, each rank gathers what the others have updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...boxing.plan import plan as plan_boxing
from ...boxing.steps import Move
from ...dispatch import _C
from ...dispatch.plans import gradients
from ...dispatch.plans.shards import HookOff, attach, is_global, plain, rebox, replace_shard
from ...movement.run import run
from ...movement.several import run_several
from ...movement.world import my_coordinate
from ...spec import TensorSpec
from ...spec.tracer import callbacks
from ...tensor.storage import memory
from ...tensor.storage.step_layout import (
    forget_step_layout,
    has_step_layout,
    set_step_layout,
    step_spec,
)
from ..plan import Plan


def install_step(module: nn.Module, plan: Plan) -> None:
    """Make optimizers step parameters, and backward lay out gradients, as the plan says.

    Args:
        module: a module whose parameters are global tensors.
        plan: the plan. ``step`` is the layout in which any ``torch.optim.Optimizer`` steps the
            parameter, and ``grad`` the layout of its gradient after backward.
    """
    params: list[tuple[str, Any]] = list(module.named_parameters(remove_duplicate=False))
    for name, param in params:
        layouts = plan.layouts(name)
        if layouts is None or not is_global(param):
            continue
        if layouts.grad != layouts.sbp:
            gradients.set_gradient_layout(param, layouts.grad)
        if layouts.step != layouts.sbp:
            set_step_layout(param, layouts.step)
            install_step_hooks()


def uninstall_step(param: Any) -> None:
    """Undo ``install_step`` for ``param``, so that it steps in its stored layout."""
    forget_step_layout(param)
    gradients.forget_gradient_layout(param)


def in_step(param: Any) -> bool:
    """Return whether a step of ``param`` by an optimizer is under way, or ended with an error."""
    return "_in_step" in param.__dict__


_ON_OPTIMIZER_STEP = callbacks("on_optimizer_step")


@cache
def install_step_hooks() -> None:
    """Install torch's hooks around the steps of all optimizers, once.

    They bring parameters to the layouts of the step, and back.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Bring parameters to the layouts of the step (pre-hook), and wrap a closure among ``args``."""
    if torch.compiler.is_compiling():
        return None
    # First: a callback may apply ``matrix_step``, whose parameters ``_params_to_lay_out`` skips.
    for notify in _ON_OPTIMIZER_STEP:
        notify(optimizer)
    if not _has_params_to_lay_out(optimizer):
        return None
    enter_step_layouts(optimizer)
    return wrap_closure(
        args, kwargs, lambda: leave_step_layouts(optimizer), lambda: enter_step_layouts(optimizer)
    )


def wrap_closure(
    args: tuple, kwargs: dict, before: Callable[[], None], after: Callable[[], None]
) -> tuple[tuple, dict] | None:
    """Wrap the closure among the arguments of an optimizer's ``step``, which computes a loss.

    The closure then sees parameters in their stored layouts, which a forward needs. If it raises,
    the parameters stay in these layouts.

    Args:
        args, kwargs: the arguments of the optimizer's ``step``.
        before: is called before the closure, to leave the layouts of the step.
        after: is called after the closure, to enter them again.

    Returns:
        the new arguments; None if there is no closure.
    """

    def wrapped(closure: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(closure)
        def run_closure() -> Any:
            before()
            loss = closure()
            after()
            return loss

        return run_closure

    if len(args) > 1 and callable(args[1]):
        return (args[0], wrapped(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrapped(kwargs["closure"])}
    return None


def _after_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
    if _has_params_to_lay_out(optimizer):
        leave_step_layouts(optimizer)


def _has_params_to_lay_out(optimizer: Any) -> bool:
    """Return whether an optimizer has parameters whose layout or dtype changes for its step."""
    # Only steps without global tensors are compiled, and Dynamo would trace the code below.
    return not torch.compiler.is_compiling() and any(True for _ in _params_to_lay_out(optimizer))


def _params_to_lay_out(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer whose layout or dtype changes for its step.

    Those that one rank steps whole (``matrix_step``) are left out.
    """
    masters, owners = (optimizer.__dict__.get(name) for name in ("_masters", "_owned"))
    for group in optimizer.param_groups:
        # One rank steps each of them whole.
        if owners is not None and owners.is_stepped_whole(group):
            continue
        for param in group["params"]:
            if is_global(param) and (has_step_layout(param) or masters is not None):
                yield param


@torch.no_grad()
def enter_step_layouts(optimizer: Any) -> None:
    """Bring the parameters of ``optimizer``, their gradients and state to the step's layouts.

    Called before a step. Replicated tensors are only sliced, so nothing is sent for them.
    """
    masters = optimizer.__dict__.get("_masters")
    for param in _params_to_lay_out(optimizer):
        if "_in_step" not in param.__dict__:  # there already if an earlier step raised
            param.__dict__["_in_step"] = _ParameterInStep(param, masters)
        state = optimizer.state.get(param)
        if state:
            _lay_out_state(state, param._spec)


@torch.no_grad()
def leave_step_layouts(optimizer: Any) -> None:
    """Bring the stepped parameters back to their stored layouts; called after a step.

    New values are gathered in as few messages as possible.
    """
    steps = [(param, param.__dict__.get("_in_step")) for param in _params_to_lay_out(optimizer)]
    under_way = [(param, step) for param, step in steps if step is not None]
    gather_into([new_value for param, step in under_way for new_value in step.new_values(param)])
    for param, step in under_way:
        del param.__dict__["_in_step"]
        step.restore(param)


class _NewValue(NamedTuple):
    """A new value to be redistributed after a step.

    Attributes:
        out: the memory to fill.
        value: the local tensor with the new value.
        src, dst: the spec that it has, and the one that it is to have.
    """

    out: Tensor
    value: Tensor
    src: TensorSpec
    dst: TensorSpec


class _ParameterInStep:
    """A parameter during an optimizer step, with its shard, spec and gradient from before.

    Making an instance brings the parameter and its gradient to the layout of the step.

    Args:
        param: the parameter.
        masters: the optimizer's float32 copies, of which one is stepped; None without them.
    """

    def __init__(self, param: Any, masters: Any) -> None:
        self.spec: TensorSpec = param._spec
        target = step_spec(param)
        self.whole = plain(param).detach()
        self.grad: Any = gradients.raw_grad(param)
        self.part = _local_part(self.whole, self.spec, target)
        self.masters = masters
        value = self.part if masters is None else masters.copy_of(param, self.part, target)
        self.target = target if masters is None else target.with_dtype(value.dtype)
        if self.target is not self.spec:
            memory.take_over_memory(param, attach(value.view_as(value), self.target))
        self.step_grad = self._enter_grad(param)
        _C.watch_if_leaf(param)

    def _enter_grad(self, param: Any) -> Any:
        """Return the gradient in the layout of the step, after setting it as ``.grad``.

        It is a view of the present gradient if possible.
        """
        grad = self.grad
        if grad is None or grad._spec is self.target:
            return grad
        grad_spec = self.target.with_dtype(grad.dtype)
        with HookOff():
            local = Tensor.detach(grad)
        step_grad = _local_part(local, grad._spec, grad_spec).to(self.target.dtype)
        step_grad = attach(
            step_grad.detach() if step_grad.is_sparse else step_grad.view_as(step_grad), self.target
        )
        gradients.set_raw_grad(param, step_grad)
        self.version = step_grad._version
        return step_grad

    def new_values(self, param: Any) -> list[_NewValue]:
        """Return the new value as a list of one, if it must be redistributed; otherwise ``[]``.

        It fills the memory that the parameter had before the step.
        """
        if param._spec is not self.target or self.target is self.spec:
            return []
        value, new_spec = plain(param).detach(), self.target.with_dtype(self.spec.dtype)
        if value.dtype is not self.spec.dtype:
            self.part.copy_(value)
            value = self.part
        return [] if new_spec is self.spec else [_NewValue(self.whole, value, new_spec, self.spec)]

    def restore(self, param: Any) -> None:
        """Restore the layouts of the parameter and its gradient from before the step."""
        if param._spec is not self.target:  # the layout was changed during the step
            return
        if self.target is not self.spec:
            memory.take_over_memory(param, attach(self.whole, self.spec))
        if self.masters is not None:
            self.masters.mark_current(param)
        grad = gradients.raw_grad(param)
        if grad is self.step_grad and grad is not self.grad:
            if grad._version == self.version or grad._spec.dtype is not self.grad._spec.dtype:
                gradients.set_raw_grad(param, self.grad)
        _C.watch_if_leaf(param)


def gather_into(new_values: list[_NewValue]) -> None:
    """Redistribute each new value into its ``out``.

    Those whose ``out`` is contiguous travel together in few messages, the others one by one.
    """
    alone = [item for item in new_values if item.out.is_meta or not item.out.is_contiguous()]
    together = [item for item in new_values if not item.out.is_meta and item.out.is_contiguous()]
    routes = [(item.src, item.dst) for item in together]
    with HookOff():
        run_several([item.value for item in together], routes, [item.out for item in together])
        for item in together:  # transports write to memory without raising the version counter
            torch.autograd.graph.increment_version(item.out)
        for item in alone:
            item.out.copy_(run(item.value, item.src, item.dst))


def _local_part(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """Return the local tensor under ``dst``, for one under ``src``.

    It is a view of ``local`` if that only needs a slice (B to S); otherwise it is redistributed.
    """
    if src is dst:
        return local
    is_slice = all(isinstance(m, Move) and m.kind == "slice" for m in plan_boxing(src, dst))
    is_slice = is_slice and not dst.layout.is_cut
    if local.is_sparse or not is_slice:  # a slice of a sparse tensor is not a view
        return run(local, src, dst)
    at = my_coordinate(src.placement)
    (starts, _), (firsts, sizes) = src.region(at), dst.region(at)
    for dim, (start, first, size) in enumerate(zip(starts, firsts, sizes, strict=True)):
        local = local.narrow(dim, first - start, size)
    return local


def _lay_out_state(state: dict, spec: TensorSpec) -> None:
    """Bring optimizer state of a parameter's shape to the layout of its step.

    State that was loaded from a checkpoint may have another layout.

    Args:
        state: name -> value, the state of one parameter; changed in place.
        spec: the spec of the parameter in the step.
    """
    for value in state.values():
        if is_global(value) and value._spec.shape == spec.shape:
            target = spec.with_dtype(value.dtype)
            if value._spec is not target:
                replace_shard(value, plain(rebox(value, target, "optimizer state")), target)
