"""Functions that would see this rank's shard, because they call no ``__torch_function__``.

For global tensors they raise, or run on whole ones.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..dispatch import _C
from ..dispatch.plans.shards import is_global
from ..dispatch.running.whole_call import call_whole
from .redirect import redirect, refusal, refuse

_COPY = "x.full() for the whole value, x.to_local() for the shard, or x.clone()"
_GRADIENT = "torch.autograd.grad, which works on global tensors, or x.full()"
_NESTED = "torch.cat and x.split, or x.full() for the whole value"
_PARALLEL = (
    "the module as consistent.parallelize(module, placement, plan) left it: it sums gradients by "
    "itself, and plan='zero3' shards parameters"
)
_COLLECTIVE = "x.to_global(sbp=...), which plans the collective, or pass x.to_local()"
_EXPORT = "the function eagerly, or trace it on plain tensors: x.full() or x.to_local()"

# (path of the builtin in torch, the name that callers know, what to use instead)
_BUILTINS = (
    *((f"torch.{name}", f"torch.{name}", _COPY) for name in (
        "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor",
        "sparse_csc_tensor", "sparse_csr_tensor", "_sparse_coo_tensor_unsafe",
        "_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe",
    )),
    ("torch._C._to_dlpack", "dlpack", _COPY),
    ("torch._C._to_dlpack_versioned", "dlpack", _COPY),
    ("torch._C.TensorBase._make_subclass", "torch.Tensor._make_subclass", _COPY),
    ("torch._C.TensorBase._dtensor__new__", "DTensor", _COPY),
    ("torch._C.TensorBase.as_subclass", "torch.Tensor.as_subclass", _COPY),
    *((f"torch._C._functorch.{name}", "torch.func", _GRADIENT) for name in (
        "_add_batch_dim", "_remove_batch_dim", "_wrap_for_grad", "_unwrap_for_grad",
        "_wrap_functional_tensor", "_unwrap_functional_tensor",
    )),
    ("torch._C._nested.nested_tensor", "torch.nested.nested_tensor", _NESTED),
    *((f"torch._C.{name}", "torch.jit.trace", _EXPORT) for name in (
        "_create_function_from_trace", "_create_function_from_trace_with_dict",
        "_create_graph_by_tracing",
    )),
    ("torch._C._distributed_c10d._verify_params_across_processes",
     "DistributedDataParallel", _PARALLEL),
    ("torch._C._distributed_c10d._broadcast_coalesced", "DistributedDataParallel", _PARALLEL),
    *((f"torch._C.{name}", "torch.cuda.comm", _PARALLEL) for name in (
        "_broadcast", "_broadcast_out", "_broadcast_coalesced", "_scatter", "_scatter_out",
        "_gather", "_gather_out",
    )),
    *((f"torch._C._nccl_{name}", f"torch.cuda.nccl.{name}", _COLLECTIVE) for name in (
        "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter",
    )),
)  # fmt: skip

# Event that a wrapper of whole modules logs before it changes anything -> name of the wrapper.
_WRAPPERS = {
    "torch.nn.parallel.DataParallel": "DataParallel",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_shard": "fully_shard",
    "torch.distributed.replicate": "replicate",
    "torch.distributed._composable.replicate_with_fsdp": "replicate",
    "torch.distributed.tensor.parallel.parallelize_module": "parallelize_module",
    "torch.dtensor.distribute_module": "distribute_module",
}

# Properties to which a tensor can be assigned. Torch calls ``__torch_function__`` for their owner
# only, not for the assigned tensor.
_PROPERTIES = ("data", "grad", "_grad", "real", "imag")


def install() -> None:
    """Make functions raise that would see shards, and scripted functions run on whole tensors."""
    for path, name, instead in _BUILTINS:
        builtin = _find(path)
        if builtin is not None:
            refuse(builtin, name, instead)
    for cls in (torch._C.TensorBase, *torch._tensor_classes):
        _C.redirect_class(cls, _refuse_class)
    for name in ("new", "set_"):
        redirect(
            getattr(torch._C.TensorBase, name), functools.partial(_refuse_global_argument, name)
        )
    for name in _PROPERTIES:
        _C.redirect_property(getattr(torch._C.TensorBase, name), _refuse_assigned(name))
    redirect(torch._C._log_api_usage_once, _check_wrapped_module, "always")
    redirect(torch._C._create_module_with_type, _check_scripted_module, "always")
    redirect(torch.sparse_coo_tensor, _sparse_coo_tensor)
    launch = _find("torch._C._cuda_jiterator_compile_and_launch_kernel")
    if launch is not None:
        redirect(launch, _launch_jiterator_kernel)
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        _run_scripted_on_wholes(kind)
    if torch.distributed.is_available():
        _C.refuse_collectives(_COLLECTIVE)


def _find(path: str) -> Any:
    """Return the object at the dotted ``path`` in torch; None if this torch has none."""
    first, *rest = path.split(".")
    assert first == "torch"
    return functools.reduce(lambda value, name: getattr(value, name, None), rest, torch)


def _refuse_class(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Raise for a constructor of a tensor class that is given a global tensor."""
    raise refusal(f"{cls.__module__}.{cls.__name__}", _COPY, args, kwargs)


def _refuse_global_argument(
    name: str, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Raise for a method ``name`` of a plain tensor that is given a global one."""
    if is_global(self):  # torch calls __torch_function__ itself
        return original(self, *args, **kwargs)
    raise refusal(f"plain.{name}(x)", _COPY, args, kwargs)


def _check_wrapped_module(original: Callable[..., Any], event: str, *rest: Any) -> Any:
    """Raise if a module with global parameters is given to a wrapper such as FSDP or DDP.

    The wrappers log an event by torch's function ``original`` before they change anything. Their
    argument is read from their frame.
    """
    if event in _WRAPPERS:  # the wrappers are Python code that may not be imported yet
        module = sys._getframe(1).f_locals.get("module")
        for part in module if isinstance(module, list | tuple) else [module]:
            if isinstance(part, torch.nn.Module):
                global_tensors = [x for x in (*part.parameters(), *part.buffers()) if is_global(x)]
                if global_tensors:
                    raise refusal(_WRAPPERS[event], _PARALLEL, global_tensors[0])
    return original(event, *rest)


def _check_scripted_module(original: Callable[..., Any], *args: Any) -> Any:
    """Raise if ``torch.jit.script`` gets a parallelized module, whose hooks it cannot compile."""
    caller = sys._getframe(1)
    module, outer_caller = caller.f_locals.get("nn_module"), caller.f_back
    # A traced module is refused when it runs.
    is_traced = outer_caller is not None and outer_caller.f_locals.get("is_tracing")
    if isinstance(module, torch.nn.Module) and not is_traced:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            # The hook is a method of an object of this library, or such an object itself.
            if type(getattr(hook, "__self__", hook)).__module__.startswith("consistent."):
                raise RuntimeError(
                    f"torch.jit.script: {type(module).__name__} has hooks that its plan has put "
                    "there, which gather global tensors and box what it is given, and TorchScript "
                    "cannot compile them. Use consistent.compile, or script a plain module, into "
                    "which consistent.checkpoint.full_state_dict(module) was loaded."
                )
    return original(*args)


def _sparse_coo_tensor(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Implement ``torch.sparse_coo_tensor`` of global indices or values, on whole tensors."""
    return call_whole("sparse_coo_tensor", original, args, kwargs)


def _launch_jiterator_kernel(original: Callable[..., Any], code: str, name: str, *rest: Any) -> Any:
    """Run a kernel of ``torch.cuda.jiterator`` on whole tensors.

    torch calls no ``__torch_function__`` for it.
    """
    return call_whole(name, original, (code, name, *rest), {})


def _refuse_assigned(name: str) -> Callable[[Any, Any], None]:
    """Return a function that raises for ``plain.<name> = x`` with a global ``x``."""

    def refuse_assigned(_: Any, value: Any) -> None:
        raise refusal(f"plain.{name} = x", "x.full() for the whole value, or x.to_local()", value)

    return refuse_assigned


def _run_scripted_on_wholes(kind: Any) -> None:
    """Make calls of ``kind``, scripted functions or methods, run on whole tensors."""
    call = kind.__dict__["__call__"]
    if not isinstance(call, types.FunctionType):
        redirect(call, _call_scripted)
        return

    # torch.testing has replaced the builtin by a Python function, which redirect cannot change.
    @functools.wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_global = _C.holds_global((args, kwargs))
        return (
            _call_scripted(call, self, *args, **kwargs)
            if has_global
            else call(self, *args, **kwargs)
        )

    kind.__call__ = called


def _call_scripted(call: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the scripted function ``script`` on whole tensors; ``call`` is torch's ``__call__``."""
    return call_whole(f"scripted {script.name}", functools.partial(call, script), args, kwargs)
