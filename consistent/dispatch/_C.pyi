"""The dispatch hook, csrc/bindings/dispatch."""

from collections.abc import Callable
from typing import Any

import torch

from .plans.plan import Plan

class PlanTable:
    """Plans by key: those for one size, and those for all."""

    counts: tuple[int, int]
    def __init__(self, plan_each: bool = False, most: int = 4096, /) -> None: ...
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

def in_backward_of_shards(now: bool, /) -> bool:
    """Whether this thread runs backward over global tensors from now on, and did before: there the
    search for NaN in anomaly mode does not end it; see ``take_nan_found``."""

def take_nan_found() -> str:
    """What anomaly mode says of the first NaN in backward since it was asked last, or ""."""

def make_getter(descriptor: Any, /) -> Callable[[Any], Any]:
    """What a property of torch.Tensor says of a global tensor's shard."""

def make_handle(fallback: Callable[..., Any], /) -> Callable[..., Any]:
    """torch.overrides.handle_torch_function, which calls the fallback for hooks of others."""

def no_sequence(cls: type, /) -> None:
    """Let C code hear that instances of `cls` are not sequences, as it does of tensors."""

def on_first_tensor(function: Callable[[], None], /) -> None:
    """Call `function` once, before the first global tensor of this process is made."""

def original(builtin: Any, /) -> Any:
    """A builtin of torch as torch made it: it goes past its redirection."""

def redirect(
    builtin: Any,
    handler: Callable[..., Any],
    when: str,
    after: Callable[..., Any] | None,
    /,
) -> None:
    """Calls of the builtin go to the handler; `when` is always, global or graph."""

def redirect_class(cls: type, handler: Callable[..., Any], /) -> None:
    """Instances of `cls` are made by the handler where it is given a global tensor."""

def redirect_property(property: Any, handler: Callable[[Any, Any], Any], /) -> None:
    """Where a plain tensor's property is assigned a global tensor, `handler(owner, value)` is
    called."""

def holds_global(value: Any, /) -> bool:
    """Whether `value` is, or holds, a global tensor."""

def read_numbers_by(read: Callable[[Any], Any], /) -> None:
    """Where torch reads the number in a global tensor, it gets what `read` gives."""

def refuse_collectives(instead: str, /) -> None:
    """Collectives of torch.distributed raise for global tensors and say what to call instead."""

def set_aside() -> Any:
    """Switch off the modes and hooks that are on in this thread."""

def bring_back(before: Any, /) -> None:
    """Switch on what `set_aside` gave."""

def use(table: PlanTable, /) -> PlanTable:
    """Look plans up in `table` from now on, in this thread; returns the one before."""

def key_of(
    func: Callable[..., Any], args: tuple, kwargs: dict, general: bool, /
) -> tuple[bytes, tuple]:
    """The key that plans are found by, for one size or (`general`) for all: equal calls have equal
    ones."""

def forget_functions() -> None:
    """Ask again what each function of torch is, as after new ones were entered."""

def set_up(
    global_tensor: type,
    mirrored_tensor: type,
    tensor_spec: type,
    layout: type,
    resolve: Callable[[Any], Any],
    make_plan: Callable[..., Plan],
    moved_view_error: Callable[[str], Exception],
    observers: list,
    moved_views: list,
    freshened: Callable[[tuple, dict], tuple | None],
    wrote: Callable[[Any], None],
    forward_ad: Any,
    check_mode: Any,
    count_lack: Callable[[BaseException], None],
    /,
) -> None:
    """What the hook calls when the hot path is not enough."""

# -- leaf_module.cpp -------------------------------------------------------------------------------

def held_gradient(leaf: Any, /) -> Any:
    """The gradient without what waits for its sum."""

def set_gradient(leaf: Any, grad: Any, /) -> None:
    """Set it as it is: in another layout its shard has another shape than the leaf's."""

def assign_gradient(leaf: Any, value: Any, /) -> None:
    """What a user does who sets it."""

def watch(leaf: Any, bucket: int, nbytes: int, /) -> None:
    """From now on gradients are summed over the ranks of `bucket`, which are none for -1."""

def watch_if_leaf(tensor: Any, /) -> None:
    """A leaf that asks for gradients is watched; asks nothing of autograd's graph."""

def unwatch(leaf: Any, /) -> None:
    """From now on gradients are added as torch computes them."""

def is_watched(leaf: Any, /) -> bool:
    """Whether `watch` was called for it."""

def is_partial(leaf: Any, /) -> bool:
    """Whether a gradient of the leaf that has no spec yet is an addend."""

def set_partial(leaf: Any, value: bool, /) -> None:
    """Say so."""

def set_sync(value: bool, /) -> bool:
    """Whether this thread sums gradients; returns what it was before."""

def is_synced() -> bool:
    """Whether this thread sums gradients."""

def wait(leaf: Any, addend: torch.Tensor, replaces: bool, /) -> None:
    """The addend waits for its bucket; if it replaces, its sum takes the place of the gradient."""

def wait_alone(leaf: Any, addend: torch.Tensor, /) -> None:
    """A large addend, which nobody else writes to, is launched by itself."""

def hold(leaf: Any, addend: torch.Tensor, bucket: int, nbytes: int, /) -> int:
    """The addend waits in `bucket`, or is on its way if that is negative; whoever holds it adds the
    sum. Returns its position."""

def launch_if_full(bucket: int, /) -> None:
    """Launch it if it has bytes enough."""

def let_go(position: int, /) -> None:
    """What was held is on its way."""

def take_back(position: int, /) -> bool:
    """The sum of what was sent is there: whether it is still to be added."""

def launch_all() -> None:
    """Give all waiting addends to their buckets."""

def accumulate(positions: list[int], flat: torch.Tensor, /) -> None:
    """Add the sums of these waiting addends, side by side in `flat`, to the gradients."""

def waiting_for(leaf: Any, /) -> tuple[list[Any], bool, list[int]]:
    """The leaf's waiting addends, None for those on their way that are not kept, whether one
    replaces its gradient, and their positions."""

def drop_waiting(leaf: Any, /) -> None:
    """What waits for the leaf is not added any more."""

def clear_waiting() -> None:
    """Nothing waits any more."""

def set_up_leaves(
    watch: Callable[[Any], None],
    assign: Callable[[Any, Any], None],
    at_once: Callable[[], int],
    limit: Callable[[int, bool], int],
    take: Callable[[Any, torch.Tensor, bool], torch.Tensor | None],
    launch: Callable[[list[int], list[Any], torch.Tensor], None],
    send: Callable[[list[int]], None],
    settle: Callable[[Any, torch.Tensor], None],
    finish: Callable[[], None],
    shown: Callable[[Any], Any],
    /,
) -> None:
    """What the leaves' hooks call."""
