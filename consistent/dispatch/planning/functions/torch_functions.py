"""Resolution of a torch function: whose rule it uses, whether it is in place, how it is run.

torch hands the hook functions of many kinds: builtins, methods, slot wrappers, property getters,
operator overloads, and Python functions that are compositions of other ops. The last are *opened*:
their Python body is run on the global tensors, so that every op inside it is dispatched by its own
rule and reads logical shapes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....rules import table
from ...plans.plan import handlers, list_ops
from ...running.whole_call import call_whole
from ..writes import reshapes_in_place, written_arguments
from .call_rewrites import REWRITES, first_supported
from .other_libraries import REPLACEMENTS
from .questions import OPERATORS, is_query, refusal

# Operators whose op has another name than the operator without its underscores.
_OPERATORS = {
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__rand__": "bitwise_and",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_",
    "__ixor__": "bitwise_xor_",
    "__ilshift__": "bitwise_left_shift_",
    "__irshift__": "bitwise_right_shift_",
    "__getitem__": "getitem",
    "__setitem__": "setitem_",
    "__truediv__": "div",
    "__div__": "div",
    "__itruediv__": "div_",
    "__idiv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
    "__mod__": "remainder",
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__ipow__": "pow_",
    "__matmul__": "matmul",
    "__imatmul__": "matmul_",
    "__radd__": "add",
    "__rmul__": "mul",
    "__abs__": "abs",
    # torch.mm, torch.spmm and torch.dsmm are one function and so one key. Whichever is called
    # first would give the name, so all are called mm.
    "spmm": "mm",
    "dsmm": "mm",
    "hsmm": "hspmm",
    "saddmm": "sspaddmm",
}


@dataclass(frozen=True)
class TorchFunction:
    """A function of torch as dispatch sees it: its op, and facts that hold for all of its calls.

    For ``torch.Tensor.__iadd__``: name ``add``, in place. ``run`` computes the op.
    """

    name: str
    inplace: bool
    run: Callable[..., Any]
    # "op": look up the row of its name; "open": run the Python body; "whole": run on gathered
    # tensors; "raw": the getter of a property
    kind: str

    @cached_property
    def row(self) -> table.Row | None:
        """The op's row in the rule table, which gives the layouts that it supports, or None."""
        return table.find_row(self.name) if self.kind == "op" else None

    @cached_property
    def call(self) -> Callable[..., Any] | None:
        """A function that handles every call without planning, or None if calls are planned.

        For a query that has no answer for a global tensor, such as ``data_ptr``, the function
        raises.
        """
        handler = handlers.get(self.name + "_" * self.inplace)
        # None for a foreach op without a handler, which `plan_list_op` plans.
        if handler is not None or self.name.startswith(tuple(list_ops)):
            return handler
        is_op = self.kind == "op" and not is_query(self.name, self.inplace, self.run)
        runs_itself = self.kind in ("open", "whole")
        if self.kind == "raw" or not (is_op or runs_itself):
            return refusal(self.name)
        return self.run if runs_itself else None

    @cached_property
    def free_names(self) -> tuple[str, ...]:
        """Names of the arguments whose integers do not affect layouts.

        The key of a call leaves these integers out, so that one plan serves all of their values.
        """
        if self.row is None or self.row.numbers == "*":
            return ()
        return tuple(self.row.numbers.split())

    @cached_property
    def free(self) -> int:
        """Bit mask of the positions of the arguments in ``free_names``, as the C++ hook reads it.

        Bit i stands for position i, and the last bit for all further positions.
        """
        if self.row is not None and self.row.numbers == "*":
            return (1 << _POSITIONS) - 1
        return sum(1 << self.row.position(name) for name in self.free_names) if self.row else 0

    @cached_property
    def sizing(self) -> int:
        """Code of how a plan for all sizes turns logical sizes in the arguments into the shard's.

        It is the value of the row's ``Sizing``, or 0 if there is none.
        """
        return 0 if self.row is None or self.row.sizing is None else int(self.row.sizing)

    @cached_property
    def outs(self) -> tuple[str, ...]:
        """Names of the parameters that receive results if passed, such as ``out``.

        An overload of an operator may have several, such as ``values`` and ``indices``.
        """
        if not isinstance(self.run, torch._ops.OpOverload):
            return ("out",)
        return tuple(a.name for a in self.run._schema.arguments if a.is_out)

    @cached_property
    def written(self) -> tuple[tuple[int, str], ...]:
        """(position, name) of the arguments that torch's schemas mark as written.

        Without ``out=``, which ``outs`` has.
        """
        return written_arguments(self.run)

    @cached_property
    def reshapes(self) -> bool:
        """True if the op writes in place and may change the sizes of its target.

        ``squeeze_`` is one.
        """
        return self.inplace and reshapes_in_place(self.run)


_POSITIONS = 32


# Resolved property getters. Torch makes a new wrapper object for each call, so the hook cannot
# cache them by identity.
_property_getters: dict[tuple[Any, str], TorchFunction] = {}


def resolve(func: Callable[..., Any]) -> TorchFunction:
    """Return the description of the torch function ``func``, which the hook has been called for.

    The hook caches it by ``func``.
    """
    if isinstance(func, types.MethodWrapperType):  # the getter of a property, such as Tensor.T
        prop: Any = func.__self__
        function = _property_getters.get((prop, func.__name__))
        if function is None:
            function = TorchFunction(f"{prop.__name__}.{func.__name__}", False, func, "raw")
            _property_getters[prop, func.__name__] = function
        return function
    namespace = _namespace(func)
    reason = _why_refused(func, namespace)
    if reason is not None:
        return _refusing_function(_canonical_name(getattr(func, "__name__", str(func)))[0], reason)
    if isinstance(func, OPERATORS):
        return _resolve_op(func, namespace)
    if not namespace.startswith("torch") and isinstance(func, types.FunctionType):
        # A function of another library that calls __torch_function__; rows are for torch's only.
        return TorchFunction(f"{namespace}.{func.__qualname__}", False, opened_body(func), "open")
    name, inplace = _canonical_name(getattr(func, "__name__", str(func)))
    if isinstance(func, types.FunctionType):
        inner = getattr(func, "__wrapped__", None)
        # A Python wrapper of a builtin, such as Tensor.__pow__: the builtin has the row.
        if inner is not None and not isinstance(inner, types.FunctionType):
            return resolve(inner)
        row = table.find_row(name)
        if row is not None and row.composite:
            return TorchFunction(name, inplace, func, "op")
        body = first_supported(REWRITES.get(func), opened_body(inner or func))
        return TorchFunction(name, inplace, body, "open")
    return TorchFunction(name, inplace, func, "op")


def _namespace(func: Any) -> str:
    """Return the namespace of an operator, as ``aten``, or the module of any other function."""
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name.partition("::")[0]
    return getattr(func, "__module__", None) or "torch"


def _why_refused(func: Any, namespace: str) -> str | None:
    """Return the error message if ``func`` cannot take global tensors at all, else None.

    Refused are collectives of ``torch.distributed``, functions that make nested tensors, and
    higher-order operators. ``namespace`` is that of ``func``, see ``_namespace``.
    """
    name = getattr(func, "__name__", str(func))
    if "c10d" in namespace or namespace.startswith("torch.distributed"):
        return (
            f"{name}: a collective of torch.distributed was given a global tensor and would see "
            "this rank's shard only. Use x.to_global(sbp=...), which plans the collective, or pass "
            "x.to_local()."
        )
    if name.startswith(("_nested_", "nested_")) and not is_query(name, False, func):
        return (
            f"torch.nested: {name} was given a global tensor, and a nested tensor of it would hold "
            "this rank's shard only. Use torch.cat and x.split, or x.full() for the whole value."
        )
    if isinstance(func, torch._ops.HigherOrderOperator):
        return (
            f"{name}: an operator that torch.compile traces was given a global tensor and would "
            "trace this rank's shard only. Use ordinary control flow and functions, which run "
            "eagerly on global tensors, or pass x.full()."
        )
    return None


def _refusing_function(name: str, reason: str) -> TorchFunction:
    """Return a description of the function ``name`` whose calls all raise TypeError(``reason``)."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError(reason)

    return TorchFunction(name, False, refuse, "open")


def _resolve_op(func: Any, namespace: str) -> TorchFunction:
    """Return the description of an operator, such as ``torch.ops.aten.add.Tensor``.

    ``namespace`` is that of the operator. Operators of other libraries than torch have no rule:
    they run on whole tensors.
    """
    overload = isinstance(func, torch._ops.OpOverload)
    name = func._schema.name if overload else func._qualified_op_name
    name_in_torch = name.split("::")[1]
    if namespace in ("aten", "prims"):
        return TorchFunction(*_canonical_name(name_in_torch), func, "op")
    if namespace == "torch_attn" and table.find_row(name_in_torch) is not None:
        return TorchFunction(name_in_torch, False, func, "op")

    written = written_arguments(func, with_out=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        return call_whole(name, func, args, kwargs, written)

    return TorchFunction(name, False, first_supported(REPLACEMENTS.get(name), run), "whole")


def _canonical_name(name: str) -> tuple[str, bool]:
    """Return (op, whether in place) for the name of a torch function or operator.

    ``"add_" -> ("add", True)``, ``"__and__" -> ("bitwise_and", False)``.
    """
    name = _OPERATORS.get(name, name)
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_"), False
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    return name, False


def handler_name(method: str) -> str:
    """Return the key in ``plan.handlers`` for a method of ``torch.Tensor``.

    ``"__iadd__" -> "add_"``
    """
    name, inplace = _canonical_name(method)
    return name + "_" * inplace


_HOOK_CHECKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def _return_false(*_: object) -> bool:
    return False


class _TorchWithoutHooks:
    """Stand-in for the module ``torch`` in opened bodies, whose ``torch.overrides`` sees no hook.

    All other attributes are torch's own.
    """

    overrides = types.SimpleNamespace(
        has_torch_function=_return_false,
        has_torch_function_unary=_return_false,
        has_torch_function_variadic=_return_false,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH_WITHOUT_HOOKS = _TorchWithoutHooks()


def opened_body(func: types.FunctionType) -> Callable[..., Any]:
    """Return a copy of the Python function ``func`` whose body runs on global tensors.

    Many of torch's Python functions begin with ``if has_torch_function(...)`` and would call the
    hook again, endlessly. In the copy the code is the same, but each such check returns False.
    The ops in the body still reach the hook.
    """
    # A copy, because torch's own module must keep its hooks.
    scope = dict(func.__globals__)
    for name in _HOOK_CHECKS:
        if name in scope:
            scope[name] = _return_false
    for name in func.__code__.co_names:
        # A private helper that checks for hooks on behalf of its public function (torch.meshgrid)
        # would dispatch to that function again, endlessly.
        helper = scope.get(name)
        if name.startswith("_") and isinstance(helper, types.FunctionType) and helper is not func:
            if not _HOOK_CHECKS.isdisjoint(helper.__code__.co_names):
                scope[name] = opened_body(helper)
    if "overrides" in func.__code__.co_names:
        if scope.get("torch") is torch:
            # torch.nn.init calls torch.overrides.has_torch_function...
            scope["torch"] = _TORCH_WITHOUT_HOOKS
        if scope.get("overrides") is torch.overrides:
            scope["overrides"] = _TORCH_WITHOUT_HOOKS.overrides  # torch.sym_int
    closure = func.__closure__
    if closure and "if_true" in func.__code__.co_freevars:
        # torch's boolean_dispatch (F.max_pool2d and the like): the two bodies in the closure check
        # for hooks as well.
        closure = tuple(types.CellType(_open_if_python(cell.cell_contents)) for cell in closure)
    opened = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, closure)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _open_if_python(value: Any) -> Any:
    return opened_body(value) if isinstance(value, types.FunctionType) else value
