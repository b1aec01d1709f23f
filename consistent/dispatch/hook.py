"""One op on global tensors: choose -> box inputs -> run torch on the shards -> attach specs.

``torch_function`` is the hook, in C++ (``csrc/bindings/dispatch``). A call's *key* is the function,
the interned specs of its tensors and its static arguments; the key finds a *plan*, and the plan
says all that is left to do:

    key -> plan    box these operands to those layouts, put these sizes in, run the function,
                   outputs get these specs

Where nothing is to be filled in, the hook runs the plan itself, with operands that the plan has
boxed; other plans run themselves (``running/``). A key that was not met before is looked up once
more without its sizes: most plans serve all sizes. If there is no plan then either, one is made
(``planning/``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd import forward_ad

from mirrored.mirrored_tensor import MirroredTensor
from mirrored.transports.failures import count_lack
from mirrored.transports.faults.place import enter_description

from ..movement import check_mode
from ..rules import table
from ..spec import Layout, TensorSpec
from ..spec.tracer import op_tracers
from . import _C
from .planning.functions.torch_functions import resolve
from .planning.planning import make_plan
from .plans import shards
from .plans.plan import handlers, list_ops, plans
from .running.current_op import current_op
from .running.moved_views import alive, freshened, moved_view_error
from .running.writes import wrote

torch_function = _C.torch_function


def enter_methods(cls: Any) -> None:
    """Let the methods and operators of ``cls`` that are ops with a row go straight to the hook.

    Torch's own methods ask for hooks as all ops do, but only after parsing their arguments.
    """
    for name, base in inspect.getmembers(torch.Tensor, inspect.ismethoddescriptor):
        if name not in vars(cls) and table.find(resolve(base).name) is not None:
            setattr(cls, name, _C.Method(base))
    _C.no_sequence(cls)


def enter_functions() -> None:
    """Let functions of torch's namespaces go straight to the hook, too. They stay the same objects,
    because other code finds them by identity."""
    for space in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special"):
        for _, function in inspect.getmembers(getattr(torch._C, space), inspect.isbuiltin):
            name = resolve(function).name
            if table.find(name) is not None or name in handlers or name.startswith(tuple(list_ops)):
                _C.enter_function(function)


def set_class(cls: Any) -> None:
    """Set the class that shards are retyped to."""
    shards.set_class(cls)
    _C.set_up(
        cls, MirroredTensor, TensorSpec, Layout, resolve, make_plan, moved_view_error, op_tracers,
        alive, freshened, wrote, forward_ad, check_mode, count_lack,
    )  # fmt: skip
    _C.use(plans)
    enter_description(current_op)
