"""One op on global tensors: choose -> box inputs -> run torch on the shards -> attach specs.

``torch_function`` is the hook, in C++ (``csrc/bindings/dispatch``). A call's *key* is the function,
the interned specs of its tensors and its static arguments; the key finds a *plan*, and the plan
says all that is left to do:

    key -> plan    box these operands to those specs, put these sizes in, run func,
                   outputs get these specs

Where nothing is to be boxed or filled in, the hook does that itself. A key not met before is
planned in Python (``planning``); what is more than one torch call is run by ``execute``. Float
arguments are keyed by type only.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mirrored.mirrored_tensor import MirroredTensor

from ..rules import table
from . import _C, shards
from .execute import execute
from .gradients import type_gradient
from .naming import know
from .plan import clear_plans, handlers, list_ops, observers, plans
from .planning import make_plan
from .ties import alive, freshened, moved_view_error

torch_function = _C.torch_function


def enter_methods(cls: Any) -> None:
    """Let the methods and operators of ``cls`` that are ops with a row go straight to the hook.

    They ask for hooks, as all ops do, but only after torch has parsed their arguments.
    """
    for name, base in inspect.getmembers(torch.Tensor, inspect.ismethoddescriptor):
        if name not in vars(cls) and table.find(know(base).name) is not None:
            setattr(cls, name, _C.Method(base))


def enter_functions() -> None:
    """The same for functions of torch's namespaces. They stay the objects that they are, for
    others know them by identity."""
    for space in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special"):
        for _, function in inspect.getmembers(getattr(torch._C, space), inspect.isbuiltin):
            name = know(function).name
            if table.find(name) is not None or name in handlers or name.startswith(tuple(list_ops)):
                _C.enter_function(function)


def set_class(cls: Any) -> None:
    """Say what shards are retyped to."""
    shards.set_class(cls)
    _C.set_up(
        cls, MirroredTensor, make_plan, execute, moved_view_error, observers, clear_plans,
        type_gradient, alive, freshened,
    )  # fmt: skip
    _C.use(plans)
