"""The dispatch hook, csrc/bindings/dispatch."""

from collections.abc import Callable
from typing import Any

from .plan import Plan

class PlanTable:
    """Plans by key."""

    def __len__(self) -> int: ...
    def clear(self) -> None:
        """Forget all plans."""
    def values(self) -> list[Plan]:
        """The plans, in no order."""

class Method:
    """A method of torch.Tensor that goes straight to the hook."""

    __wrapped__: Callable[..., Any]
    def __init__(self, base: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def torch_function(
    func: Callable[..., Any], types: Any, args: tuple, kwargs: dict | None = None, /
) -> Any:
    """The hook of GlobalTensor."""

def attach(local: Any, spec: Any, /) -> Any:
    """`local` retyped as the shard of a global tensor with `spec`; no one else holds it."""

def gradient(leaf: Any, /) -> Any:
    """The gradient of a global tensor as a global tensor, or None."""

def enter_function(function: Callable[..., Any], /) -> bool:
    """A builtin of torch -> whether it goes straight to the hook from now on."""

def make_getter(descriptor: Any, /) -> Callable[[Any], Any]:
    """What a property of torch.Tensor says of a global tensor's shard."""

def make_handle(fallback: Callable[..., Any], /) -> Callable[..., Any]:
    """torch.overrides.handle_torch_function, which calls the fallback for hooks of others."""

def use(table: PlanTable, /) -> PlanTable:
    """Look plans up in `table` from now on; returns the one before."""

def set_up(
    global_tensor: type,
    mirrored_tensor: type,
    make_plan: Callable[..., Plan],
    execute: Callable[..., Any],
    moved_view_error: Callable[[str], Exception],
    observers: list,
    clear_plans: Callable[[], None],
    type_gradient: Callable[[Any, Any], Any],
    ties: list,
    freshened: Callable[[tuple, dict], tuple | None],
    /,
) -> None:
    """What the hook calls when the hot path is not enough."""
