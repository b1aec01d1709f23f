"""What a torch function is: the name its rule stands under, whether it writes in place, how it is
run.

torch hands the hook functions of many kinds: builtins, methods, slot wrappers, property getters,
operator overloads, and Python functions that are compositions of other ops. The last are *opened*:
their Python body is run on the global tensors, so that every op inside meets its own rule and reads
logical shapes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..rules import table

# Operators whose name is not the op's name with the underscores taken off.
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
    # torch.mm, torch.spmm and torch.dsmm are one function, equal as keys: the first met names it.
    "spmm": "mm",
    "dsmm": "mm",
}


@dataclass(frozen=True, slots=True)
class Known:
    """A resolved torch function."""

    name: str
    inplace: bool
    run: Callable[..., Any]
    # "op": look its name up; "open": run the Python body; "raw": a property, ask the shard
    kind: str


_known: dict[Any, Known] = {}


def know(func: Callable[..., Any]) -> Known:
    """Resolve ``func``; the answer is remembered, except for property getters, which torch makes
    anew."""
    known = _known.get(func)
    if known is None:
        known = _resolve(func)
        if known.kind != "raw":
            _known[func] = known
    return known


def _resolve(func: Callable[..., Any]) -> Known:
    if isinstance(func, types.MethodWrapperType):  # Tensor.T.__get__ and its kin
        return Known(f"{func.__self__.__name__}.{func.__name__}", False, func, "raw")  # type: ignore[attr-defined]
    namespace = (
        getattr(func, "namespace", None)
        or getattr(func, "_qualified_op_name", "").partition("::")[0]
    )
    if isinstance(namespace, str) and "c10d" in namespace:
        raise TypeError(
            f"{func}: a collective of torch.distributed was given a global tensor and would see "
            "this rank's shard only. "
            "Use x.to_global(sbp=...), which plans the collective, or pass x.to_local()."
        )
    if isinstance(func, torch._ops.OpOverload):
        name = func._schema.name.split("::")[1]
        return Known(*_canonical(name), func, "op")
    if isinstance(func, torch._ops.OpOverloadPacket):
        return Known(*_canonical(func.__name__), func, "op")
    name, inplace = _canonical(getattr(func, "__name__", str(func)))
    if isinstance(func, types.FunctionType):
        inner = getattr(func, "__wrapped__", None)
        if inner is not None and not isinstance(inner, types.FunctionType):
            return know(inner)
        row = table.find(name)
        if row is not None and row.composite:
            return Known(name, inplace, func, "op")
        return Known(name, inplace, opened_body(inner or func), "open")
    return Known(name, inplace, func, "op")


def _canonical(name: str) -> tuple[str, bool]:
    name = _OPERATORS.get(name, name)
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_"), False
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    return name, False


_ASKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def _never(*_: object) -> bool:
    return False


class _TorchWithoutHooks:
    """``torch``, where ``torch.overrides`` knows of no hook."""

    overrides = types.SimpleNamespace(
        has_torch_function=_never,
        has_torch_function_unary=_never,
        has_torch_function_variadic=_never,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _TorchWithoutHooks()


def opened_body(func: types.FunctionType) -> Callable[..., Any]:
    """``func`` without its own hook: the same code, where the questions "is a hook defined?"
    answer no."""
    scope = dict(func.__globals__)
    for name in _ASKS:
        if name in scope:
            scope[name] = _never
    for name in func.__code__.co_names:
        # A private helper that asks on behalf of its public function (torch.meshgrid) would come
        # back to it.
        helper = scope.get(name)
        if name.startswith("_") and isinstance(helper, types.FunctionType) and helper is not func:
            if not _ASKS.isdisjoint(helper.__code__.co_names):
                scope[name] = opened_body(helper)
    if "overrides" in func.__code__.co_names and scope.get("torch") is torch:
        scope["torch"] = _TORCH  # torch.nn.init asks torch.overrides
    closure = func.__closure__
    if closure and "if_true" in func.__code__.co_freevars:
        # torch's boolean_dispatch (F.max_pool2d and its kin): the two bodies to choose from ask as
        # well.
        closure = tuple(types.CellType(_open_if_python(cell.cell_contents)) for cell in closure)
    opened = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, closure)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _open_if_python(value: Any) -> Any:
    return opened_body(value) if isinstance(value, types.FunctionType) else value
