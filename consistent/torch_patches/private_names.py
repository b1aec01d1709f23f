"""The private names of torch that this library uses, and a check that the installed torch has them.

Each name was seen in all releases of ``SEEN_RELEASES``. A torch that lacks one of ``NAMES`` is
refused when the first global tensor is made, before anything is changed in it. The names of
``LAZY_NAMES`` are in modules that are imported where they are used; a missing one fails there with
its own name. The C++ part includes ``HEADERS`` of the engine, its thread-local state and Python's
variables: it is compiled for each release, and what a release lacks is found then. A test compares
all three lists with the sources.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

SEEN_RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")

NAMES = """
    torch.Tensor._use_count
    torch._C.DisableTorchFunction
    torch._C.DisableTorchFunctionSubclass
    torch._C.ScriptFunction
    torch._C.ScriptMethod
    torch._C.TensorBase.new_tensor
    torch._C._FunctionBase
    torch._C._are_functorch_transforms_active
    torch._C._create_module_with_type
    torch._C._current_graph_task_id
    torch._C._dispatch_has_kernel_for_dispatch_key
    torch._C._functorch.is_functorch_wrapped_tensor
    torch._C._group_tensors_by_device_and_dtype
    torch._C._is_alias_of
    torch._C._is_multithreading_enabled
    torch._C._is_torch_function_enabled
    torch._C._is_tracing
    torch._C._jit_get_schemas_for_operator
    torch._C._jit_resolve_packet
    torch._C._log_api_usage_once
    torch._C._nn._parse_to
    torch._C._set_multithreading_enabled
    torch._C._storage_Use_Count
    torch._C._swap_tensor_impl
    torch._C._will_engine_execute_node
    torch._amp_foreach_non_finite_check_and_unscale_
    torch._assert_async
    torch._foreach_copy_
    torch._foreach_norm
    torch._ops.HigherOrderOperator
    torch._ops.OpOverload
    torch._ops.OpOverloadPacket
    torch._tensor_classes
    torch._tensor_str._str
    torch.autograd.Variable._execution_engine.queue_callback
    torch.autograd._profiler_enabled
    torch.autograd.forward_ad._current_level
    torch.autograd.graph._engine_run_backward
    torch.compiler._is_compiling_flag
    torch.distributed.distributed_c10d._get_default_group
    torch.distributed.distributed_c10d._get_default_store
    torch.nn.Module._call_impl
    torch.nn.modules._functions.BackwardHookFunction
    torch.nn.utils.clip_grad._clip_grads_with_norm_
    torch.nn.utils.clip_grad._get_total_norm
    torch.optim.LBFGS._gather_flat_grad
    torch.optim.Optimizer._process_value_according_to_param_policy
    torch.optim.optimizer._foreach_supported_types
    torch.utils._foreach_utils._foreach_supported_types
    torch.utils._pytree.tree_leaves
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._python_dispatch._disable_current_modes
    torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE
    torch.utils.checkpoint._allowed_determinism_checks_to_fns
""".split()

LAZY_NAMES = """
    torch._C._autograd._get_sequence_nr
    torch._C._distributed_c10d.PrefixStore
    torch._C._distributed_c10d.ProcessGroup
    torch._C._distributed_c10d.Store
    torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
    torch._C._distributed_c10d._SymmetricMemory.rendezvous
    torch._C._distributed_c10d._SymmetricMemory.set_group_info
    torch._C._distributed_c10d._register_process_group
    torch._dynamo.exc.SkipFrame
    torch._dynamo.exc.Unsupported
    torch._dynamo.source.LocalSource
    torch._dynamo.trace_rules.add
    torch._dynamo.utils
    torch._functorch.config.patch
    torch._guards.TracingContext
    torch._guards.tracing
    torch._higher_order_ops.effects._register_effectful_op
    torch._inductor.compile_fx.compile_fx
    torch._inductor.config.fx_graph_cache
    torch._inductor.config.patch
    torch._inductor.config.unsafe_marked_cacheable_functions
    torch._inductor.lowering.fallback_handler
    torch._inductor.lowering.register_lowering
    torch._inductor.runtime.cache_dir_utils.cache_dir
    torch._inductor.virtualized.V
    torch._library.effects.EffectType.ORDERED
    torch._subclasses.FakeTensorMode
    torch.distributed._symmetric_memory
    torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    torch.distributed.pipelining._utils.generate_stage_to_rank_mapping
    torch.fx.graph_module._loader.eval_cache.pop
""".split()

HEADERS = """
    ATen/PythonTorchFunctionTLS.h
    ATen/ThreadLocalState.h
    ATen/core/dispatch/Dispatcher.h
    c10/core/impl/LocalDispatchKeySet.h
    c10/core/impl/TorchDispatchModeTLS.h
    torch/csrc/Dtype.h
    torch/csrc/DynamicTypes.h
    torch/csrc/Exceptions.h
    torch/csrc/Size.h
    torch/csrc/autograd/anomaly_mode.h
    torch/csrc/autograd/custom_function.h
    torch/csrc/autograd/engine.h
    torch/csrc/autograd/function.h
    torch/csrc/autograd/function_hook.h
    torch/csrc/autograd/functions/accumulate_grad.h
    torch/csrc/autograd/graph_task.h
    torch/csrc/autograd/python_variable.h
    torch/csrc/autograd/variable.h
    torch/csrc/jit/frontend/tracer.h
    torch/csrc/utils/object_ptr.h
    torch/csrc/utils/pybind.h
    torch/csrc/utils/python_numbers.h
""".split()


def check_names() -> None:
    """Raise RuntimeError if the installed torch lacks one of the private names in ``NAMES``."""
    names = missing_names(NAMES)
    if names:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(names)}, which no document of torch "
            "promises and which ops on global tensors need.\n"
            f"  All were seen in torch {SEEN_RELEASES[0]} to {SEEN_RELEASES[-1]}: install one of "
            "these, or a newer release of this package."
        )


def missing_names(names: Iterable[str]) -> list[str]:
    """Return those of ``names``, dotted paths, that the installed torch does not have."""
    return [name for name in names if not _has_name(name)]


def _has_name(name: str) -> bool:
    """Return whether torch has ``name``, a dotted path; nothing is imported to find out."""
    module, parts = name, []
    # The longest part that is an imported module; the check itself imports nothing.
    while module not in sys.modules:
        module, _, part = module.rpartition(".")
        parts.insert(0, part)
    value = sys.modules[module]
    for part in parts:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
