"""The ``__torch_function__`` hook: run an op on global tensors by a cached plan.

To run an op, the library chooses a signature (which layouts of inputs give which layouts of
outputs), boxes the inputs to it, calls torch on the shards and attaches specs to the results. All
decisions are cached as a *plan*. ``torch_function`` is the hook itself, written in C++
(``csrc/bindings/dispatch``). The *key* of a call consists of the function, the interned specs of
its tensors and its static arguments:

```
key -> plan    box these operands to those layouts, replace logical sizes by those of the shard,
               run the function, attach these specs to the outputs
```

The hook itself runs the plans whose arguments stay as they are, apart from operands that are boxed.
All other plans run through their own ``run`` method (``running/``). If no plan has the key, the
hook looks again with a key without sizes, because most plans serve all sizes. If that fails too,
``planning/`` makes a new plan.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd import forward_ad

from mirrored.mirrored_tensor import MirroredTensor
from mirrored.transports.failures import count_out_of_memory
from mirrored.transports.faults.place import register_description

from ..movement import check_mode
from ..rules import table
from ..spec import Layout, TensorSpec
from ..spec.tracer import op_tracers
from . import _C
from .planning.functions.torch_functions import resolve
from .planning.planning import make_plan
from .plans.plan import handlers, list_ops, plans
from .running.current_op import current_op
from .running.moved_views import alive, moved_view_error, refresh_arguments
from .running.writes import count_write

torch_function = _C.torch_function


def enter_methods(cls: Any) -> None:
    """Make the methods of ``cls`` that have a row in the rule table call the hook directly.

    Called once, with the class of global tensors. Operators such as ``__add__`` are among the
    methods. Torch's own methods also call ``__torch_function__``, but only after parsing their
    arguments, so the direct call is faster.
    """
    for name, base in inspect.getmembers(torch.Tensor, inspect.ismethoddescriptor):
        if name not in vars(cls) and table.find_row(resolve(base).name) is not None:
            setattr(cls, name, _C.Method(base))
    _C.no_sequence(cls)


def enter_functions() -> None:
    """Make the functions of torch's namespaces that dispatch knows call the hook directly.

    These are functions such as ``torch.add``, ``F.linear`` or ``torch.linalg.det`` whose op has a
    row in the rule table or a handler. Each function object stays the same and changes in place,
    because other code finds functions by identity.
    """
    for space in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special"):
        for _, function in inspect.getmembers(getattr(torch._C, space), inspect.isbuiltin):
            name = resolve(function).name
            if (
                table.find_row(name) is not None
                or name in handlers
                or name.startswith(tuple(list_ops))
            ):
                _C.enter_function(function)


def set_up(cls: Any) -> None:
    """Give the C++ hook the class of global tensors and the Python functions that it calls.

    Called once on import, before the first op on a global tensor.
    """
    _C.set_up(
        cls, MirroredTensor, TensorSpec, Layout, resolve, make_plan, moved_view_error, op_tracers,
        alive, refresh_arguments, count_write, forward_ad, check_mode, count_out_of_memory,
    )  # fmt: skip
    _C.use(plans)
    register_description(current_op)
