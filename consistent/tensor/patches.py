"""Every place where torch itself is patched, and why.

Some entry points of torch never ask ``__torch_function__`` and would quietly see a global tensor's
local shard. Each is replaced by a function that either does the right thing for global tensors or
says what to call, and passes everything else through. ``install`` runs once, on import of
``consistent``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.modules._functions as module_functions
import torch.optim.optimizer as optimizer
import torch.utils.checkpoint as checkpointing
import torch.utils.hooks as module_hooks
from torch.utils import _foreach_utils

from ..local import generator
from ..spec import B
from . import _C, autograd, dispatch, foreach, gradients, handlers  # noqa: F401  (two enter their ops)
from .arguments import collect, replace
from .global_tensor import GlobalTensor
from .naming import opened_body
from .plan import Plan, observers
from .plan import handlers as entered
from .planning import common_placement
from .shards import HookOff, adopt, attach, plain, rebox, whole_result

_RNG_ATTRIBUTE = "_consistent_rng_state"
_HANDLE = "handle_torch_function"

# Entry points of torch.distributed that take tensors.
_COLLECTIVES = """
all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
all_reduce_coalesced all_to_all all_to_all_single batch_isend_irecv broadcast
broadcast_object_list gather gather_object irecv isend recv reduce reduce_scatter
reduce_scatter_tensor scatter scatter_object_list send
""".split()
_NO_COLLECTIVE = "x.to_global(sbp=...), which plans the collective, or pass x.to_local()"


def install() -> None:
    """Patch torch; a second call does nothing."""
    if getattr(torch, "_consistent_installed", False):
        return
    torch._consistent_installed = True  # type: ignore[attr-defined]
    _patch_backward()
    _patch_function_apply()
    _patch_module_hooks()
    _patch_checkpoint()
    _enter_foreach()
    _patch_rng()
    _patch_questions()
    dispatch.enter_functions()
    _guard_construction()
    _guard_collectives()
    _guard_functorch()
    _guard_nested()


def _holds_global(value: Any) -> bool:
    if value.__class__ is GlobalTensor:
        return True
    if isinstance(value, tuple | list):
        return any(_holds_global(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_global(item) for item in value.values())
    return False


# -- backward starts from the dual SBP, and ends when the gradient buckets have landed -------------


def _patch_backward() -> None:
    make_grads = torch.autograd._make_grads
    engine = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]

    def make(outputs: Any, grads: Any, is_grads_batched: bool) -> tuple:
        if not any(out.__class__ is GlobalTensor for out in outputs):
            return make_grads(outputs, grads, is_grads_batched)
        if is_grads_batched:
            raise RuntimeError(
                "autograd.grad: is_grads_batched=True runs vmap over the shards of a global "
                "tensor, which would not see "
                "the other ranks. Call autograd.grad once per gradient."
            )
        made: list[Any] = []
        for out, grad in zip(outputs, grads, strict=True):
            if out.__class__ is GlobalTensor:
                made.append(autograd.seed(out, grad) if out.requires_grad else None)
            else:
                made.extend(make_grads((out,), (grad,), False))
        return tuple(made)

    torch.autograd._make_grads = make
    torch.autograd._engine_run_backward = functools.partial(  # pyright: ignore[reportPrivateImportUsage]
        autograd.run_engine, engine
    )
    opened = opened_body(torch.autograd.grad)  # now, as it reads the two names above

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.autograd.grad``: torch computes shards in the dual SBP of each input."""
        wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        found = opened(outputs, wanted, *args, **kwargs)
        return tuple(_typed_gradient(x, g) for x, g in zip(wanted, found, strict=True))

    entered["grad"] = grad


def _typed_gradient(x: Any, g: Any) -> Any:
    # A new object each time: torch gives the same tensor for two inputs whose gradients are equal.
    if x.__class__ is not GlobalTensor or g is None:
        return g
    return attach(plain(g), gradients.gradient_spec(x, g.dtype))


# -- autograd.Function: torch hands it the shards and loses the specs ------------------------------


def _patch_function_apply() -> None:
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    @classmethod
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _holds_global(args):
            return original(cls, *args, **kwargs)
        if cls is checkpointing.CheckpointFunction:
            # Both kinds of checkpoint compute the same; this one keeps the global tensors of the
            # closure.
            function, preserve, *rest = args
            return checkpointing.checkpoint(
                function, *rest, use_reentrant=False, preserve_rng_state=preserve
            )
        if cls.__module__.startswith("torch.distributed."):
            return _refusing(original, f"{cls.__module__}.{cls.__name__}", _NO_COLLECTIVE)(
                cls, *args, **kwargs
            )
        if cls is module_functions.BackwardHookFunction:
            return _identity(original, cls, args)
        return _apply_whole(original, cls, args, kwargs)

    torch.autograd.Function.apply = apply  # type: ignore[assignment,method-assign]


def _identity(original: Callable[..., Any], cls: Any, args: tuple) -> Any:
    """BackwardHookFunction returns its inputs; they keep their specs."""
    with HookOff():
        outs = original(cls, *args)
    for source, out in zip(args, outs, strict=True):
        if source.__class__ is GlobalTensor and out.__class__ is torch.Tensor:
            attach(out, source._spec)
    return outs


def _apply_whole(original: Callable[..., Any], cls: Any, args: tuple, kwargs: dict) -> Any:
    """A user's Function has no rule: like any such op it runs whole on every rank, forward and
    backward."""
    tensors: list[Any] = []
    collect(args, tensors)
    placement = common_placement(cls.__name__, tensors)
    everywhere = (B,) * placement.ndim
    whole = []
    for x in tensors:
        adopted = adopt(x, placement, cls.__name__)
        spec = adopted._spec.with_sbp(everywhere)
        whole.append(plain(rebox(adopted, spec, cls.__name__)))
    plan = Plan("whole", cls.__name__, cls.apply)
    plan.placement = placement
    out = original(cls, *replace(args, iter(whole)), **kwargs)
    result, outs = whole_result(out, placement)
    for observe in observers:
        observe(plan, [adopt(x, placement, cls.__name__)._spec for x in tensors], outs)
    return result


# -- checkpoint: what autograd saves is compared with what it saves again; both must be the shard's


def _patch_checkpoint() -> None:
    # A saved tensor is sometimes seen as global and sometimes as its shard, by which way the op was
    # run.
    compare = checkpointing._allowed_determinism_checks_to_fns
    mode = checkpointing._DEFAULT_DETERMINISM_MODE
    metadata = compare[mode]
    compare[mode] = lambda x: metadata(plain(x) if x.__class__ is GlobalTensor else x)


# -- foreach: torch's optimizers and clipping choose it by the exact type of the parameters --------


def _enter_foreach() -> None:
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        known.append(GlobalTensor)
    group = torch._C._group_tensors_by_device_and_dtype
    torch._C._group_tensors_by_device_and_dtype = functools.partial(_grouped, group)


def _grouped(group: Callable[..., Any], lists: Any, with_indices: bool = False) -> Any:
    """Positions of ``lists`` by device and dtype of the first list. Torch would look at the
    shard's device, which is ``meta`` outside the placement, so that the ranks would form other
    groups and in another order.
    """
    if GlobalTensor not in set(map(type, lists[0])):
        return group(lists, with_indices)
    positions: dict[Any, list[int]] = {}
    for i, first in enumerate(lists[0]):
        spec = first._spec if first.__class__ is GlobalTensor else None
        # Looked up by identity, as hashing a placement for each of many parameters would tell.
        alike = (first.device, first.dtype) if spec is None else (id(spec.placement), spec.dtype)
        positions.setdefault(alike, []).append(i)
    groups: dict[tuple, list[int]] = {}
    for indices in positions.values():
        first = lists[0][indices[0]]
        groups.setdefault((first.device, first.dtype), []).extend(indices)
    # Sorted, so that no rank's order depends on which equal placements are one object there.
    return {alike: _members(lists, sorted(i), with_indices) for alike, i in groups.items()}


def _members(lists: Any, indices: list[int], with_indices: bool) -> tuple[list, list[int]]:
    every = len(indices) == len(lists[0])
    columns = [
        list(values) if every or not values else [values[i] for i in indices] for values in lists
    ]
    return columns, indices if with_indices else []


# -- module hooks: torch hands the user's hook the raw gradients of a node -------------------------


def _patch_module_hooks() -> None:
    original = module_hooks.BackwardHook._apply_on_tensors

    @functools.wraps(original)
    def apply_on_tensors(self: Any, fn: Callable[[Any], None], args: Any) -> Any:
        specs = [
            x._spec if isinstance(x, GlobalTensor) else None
            for x in args
            if isinstance(x, torch.Tensor)
        ]
        if not any(specs):
            return original(self, fn, args)
        return original(self, lambda node: fn(_TypedNode(node, specs)), args)

    module_hooks.BackwardHook._apply_on_tensors = apply_on_tensors  # type: ignore[method-assign]


class _TypedNode:
    """BackwardHookFunction's node, an identity: the gradients that its hooks see and return are
    global tensors."""

    def __init__(self, node: Any, specs: list):
        self._node, self._specs = node, specs

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        def typed(inputs: tuple, outputs: tuple) -> Any:
            result = hook(self._global(inputs), self._global(outputs))
            return None if result is None else self._local(result)

        return self._node.register_hook(typed)

    def _global(self, grads: tuple) -> tuple:
        return tuple(
            g if g is None or spec is None else attach(g.view_as(g), spec.dual.with_dtype(g.dtype))
            for g, spec in zip(grads, self._specs, strict=True)
        )

    def _local(self, grads: tuple) -> tuple:
        return tuple(
            g if g is None or spec is None else _local_gradient(g, spec)
            for g, spec in zip(grads, self._specs, strict=True)
        )


def _local_gradient(grad: Any, spec: Any) -> torch.Tensor:
    """A gradient that a hook returned, as the raw one that torch expects for ``spec``."""
    given = adopt(grad, spec.placement, "hook")
    return plain(rebox(given, spec.dual.with_dtype(given.dtype), "hook"))


# -- random state: ours travels with torch's -------------------------------------------------------


def _patch_rng() -> None:
    seed, get, set_ = torch.manual_seed, torch.get_rng_state, torch.set_rng_state

    @functools.wraps(seed)
    def manual_seed(value: Any) -> torch.Generator:
        generator.manual_seed(value)
        return seed(value)

    @functools.wraps(get)
    def get_rng_state() -> torch.Tensor:
        state = get()
        setattr(state, _RNG_ATTRIBUTE, tuple(generator.get_state()))
        return state

    @functools.wraps(set_)
    def set_rng_state(new_state: torch.Tensor) -> None:
        ours = getattr(new_state, _RNG_ATTRIBUTE, None)
        if ours is not None:
            generator.set_state(generator.RngState(*ours))
        set_(new_state)

    for name, function in (
        ("manual_seed", manual_seed),
        ("get_rng_state", get_rng_state),
        ("set_rng_state", set_rng_state),
    ):
        setattr(torch, name, function)
        setattr(torch.random, name, function)


# -- what reads the shard and must say so ----------------------------------------------------------


# -- Python functions that ask for hooks, and then look for them once more in Python --------------


def _patch_questions() -> None:
    for module in (torch.nn.functional, torch.functional, sys.modules["torch._tensor"]):
        setattr(module, _HANDLE, _C.make_handle(getattr(module, _HANDLE)))


def _guard_construction() -> None:
    for name in ("tensor", "as_tensor", "asarray", "from_dlpack"):
        setattr(
            torch,
            name,
            _refusing(
                getattr(torch, name),
                f"torch.{name}",
                "x.full() for the whole value, x.to_local() for the shard, or x.clone()",
            ),
        )


def _guard_collectives() -> None:
    for name in _COLLECTIVES:
        original = getattr(dist, name, None)
        if original is None:
            continue
        guarded = _refusing(original, f"torch.distributed.{name}", _NO_COLLECTIVE)
        setattr(dist, name, guarded)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, guarded)


def _guard_functorch() -> None:
    import torch._functorch.eager_transforms as eager
    import torch._functorch.vmap as vmap

    hint = "torch.autograd.grad, which works on global tensors, or x.full()"
    for module, name in (
        (vmap, "_add_batch_dim"),
        (eager, "_wrap_for_grad"),
        (eager, "_wrap_functional_tensor"),
        (torch.func, "linearize"),
    ):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _refusing(original, "torch.func", hint))


def _guard_nested() -> None:
    hint = "torch.cat and x.split, or x.full() for the whole value"
    for name in (
        "as_nested_tensor", "masked_select", "narrow", "nested_tensor", "nested_tensor_from_jagged",
    ):  # fmt: skip
        original = getattr(torch.nested, name)
        setattr(torch.nested, name, _refusing(original, f"torch.nested.{name}", hint))


def _refusing(original: Callable[..., Any], name: str, instead: str) -> Callable[..., Any]:
    """``original``, raising for global tensors."""

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _holds_global(args) or (kwargs and _holds_global(kwargs)):
            found: list[Any] = []
            collect(args, found)
            collect(tuple(kwargs.values()), found)
            spec = next(
                (x._spec for x in found if x.__class__ is GlobalTensor),
                "a list with global tensors",
            )
            raise TypeError(
                f"{name}: x is a global tensor, {spec}, and {name} would see this rank's shard "
                f"only. Use {instead}."
            )
        return original(*args, **kwargs)

    return guarded
