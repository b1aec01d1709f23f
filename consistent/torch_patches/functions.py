"""Changes for ``torch.autograd.Function``, which would otherwise get shards of global tensors.

Three kinds of functions are called with global tensors:

* a user's function runs on whole, plain arguments and gradients on every rank (``whole_call``).
  Tensors that it reaches in other ways, by a closure, a module or a buffer, are global as in any
  other code, and so are results made of them (``function_nodes``);
* a function of ``torch.utils.checkpoint`` runs code on the global tensors themselves, and gets
  gradients that are global tensors;
* a function of ``torch.distributed`` would communicate shards, and raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.modules._functions as module_functions

from ..dispatch.plans.shards import HookOff, attach, is_global, plain
from ..dispatch.running.whole_call import call_whole
from ..spec.tracer import callbacks
from . import function_nodes
from .function_nodes import Specs, as_global_grads, raw_input_grad, record_globals, specs_of
from .redirect import redirect, refusal

_BEFORE_READ = callbacks("before_read")

_COLLECTIVE = "x.to_global(sbp=...), which plans the collective, or pass x.to_local()"
_REFUSED = {
    "torch.distributed.": _COLLECTIVE,
    "torch.nn.parallel.": "consistent.parallelize(module, placement, {...}) instead of the wrapper",
    "torch.nn.modules._functions.SyncBatchNorm": "torch.nn.BatchNorm1d, 2d or 3d, which takes the "
    "statistics of the whole batch however it is split",
}

_is_alias_of: Any = getattr(torch._C, "_is_alias_of")  # noqa: B009  (not in torch's stubs)


def install() -> None:
    """Replace ``Function.apply`` of torch, so that Functions accept global tensors."""
    redirect(torch._C._FunctionBase.__dict__["apply"], _apply, "global", _global_results)
    function_nodes.install()


def _apply(original: Any, cls: Any, *args: Any) -> Any:
    """Implement ``Function.apply`` of the class ``cls`` for arguments some of which are global.

    ``original`` is torch's function. Which of the three cases in this file's docstring applies
    depends on the module that defines ``cls``.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    for prefix, instead in _REFUSED.items():
        if name.startswith(prefix):
            raise refusal(name, instead, args)
    for notify in _BEFORE_READ:
        for x in filter(is_global, args):
            notify(x)
    apply = original.__get__(None, cls)
    if cls is module_functions.BackwardHookFunction:
        return _apply_backward_hook_function(apply, args)
    if cls.__module__ == "torch.utils.checkpoint":
        with _without_saved_tensors_hooks():
            out = apply(*args)
        return _global_results(out, cls, *args)
    return call_whole(cls.__name__, lambda *plain_args: _with_note(apply(*plain_args)), args, {})


# -- module hooks ----------------------------------------------------------------------------------


def _apply_backward_hook_function(apply: Callable[..., Any], args: tuple) -> Any:
    """Apply ``BackwardHookFunction``, which returns its inputs, so that they stay global.

    ``torch.nn.Module`` registers the user's backward hook on its node. The gradients that the hook
    sees and returns are global tensors.
    """
    with HookOff():
        outs = apply(*args)
    specs = [x._spec if is_global(x) else None for x in args]
    for spec, out in zip(specs, outs, strict=True):
        if spec is not None and out.__class__ is torch.Tensor:
            attach(out, spec)
    node = next((out.grad_fn for out in outs if out.grad_fn is not None), None)
    if node is not None:
        node.register_hook = _global_register_hook(node, specs)
    return outs


def _global_register_hook(node: Any, specs: Specs) -> Callable[..., Any]:
    """Return a ``register_hook`` for ``node`` whose hooks take and return global gradients.

    ``specs`` are those of the tensors that ``BackwardHookFunction`` passes on, None for plain ones.
    """
    # A weak reference, because the function becomes an attribute of the node: no cycle is made.
    register, weakly = type(node).register_hook, weakref.ref(node)

    def register_hook(hook: Callable[..., Any]) -> Any:
        def typed(inputs: tuple, outputs: tuple) -> Any:
            result = hook(as_global_grads(inputs, specs), as_global_grads(outputs, specs))
            return None if result is None else tuple(map(raw_input_grad, result, specs))

        return register(weakly(), typed)

    return register_hook


# -- functions that work on global tensors themselves ----------------------------------------------


@contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    """Disable hooks for saved tensors inside the context.

    A tensor that passes through such hooks comes back as a plain object, and the Functions of
    checkpoints save global tensors.
    """
    hooks: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in torch's stubs)
    removed_hooks = []
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        removed_hooks.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(removed_hooks):
            hooks._push_saved_tensors_default_hooks(*pair)


def _global_results(out: Any, cls: Any, *args: Any) -> Any:
    """Make the results ``out`` of a checkpoint's Function ``cls`` global, and record that.

    It is recorded on the autograd node (``record_globals``). If ``cls`` is any other Function, the
    results that are global are only recorded. ``args`` are the arguments of the call.
    """
    if cls.__module__ != "torch.utils.checkpoint":
        return _with_note(out)
    is_tuple = isinstance(out, tuple)
    outs: list[Any] = [_with_input_spec(x, args) for x in (out if is_tuple else (out,))]
    results = tuple(outs) if is_tuple else outs[0]
    record_globals(results, specs_of(args))
    return results


def _with_note(out: Any) -> Any:
    """Call ``record_globals`` for the result ``out`` and return it."""
    record_globals(out)
    return out


def _with_input_spec(x: Any, inputs: Sequence[Any]) -> Any:
    """Return the result ``x`` as a global tensor if it is an alias of a global one of ``inputs``.

    If a Function returns an input, torch makes another, plain object of it.
    """
    if x.__class__ is torch.Tensor:
        source = next((y for y in inputs if is_global(y) and _is_alias_of(x, y)), None)
        if source is not None and x.shape == plain(source).shape:
            return attach(x, source._spec)
    return x
