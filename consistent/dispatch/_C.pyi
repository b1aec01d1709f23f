"""The dispatch hook in C++, and the gradient hooks of leaves: csrc/bindings/dispatch."""

from collections.abc import Callable
from typing import Any

import torch

from .plans.plan import Plan

class PlanTable:
    """Cache of plans by the key of a call: plans for one size, and plans that serve all sizes.

    Args:
        plan_each: plan each call for its own sizes, so that no plan serves all sizes.
        most: the most plans of either kind that are kept; a new plan then replaces an old one.
    """

    counts: tuple[int, int]  # (plans for one size, plans that serve all sizes)
    def __init__(self, plan_each: bool = False, most: int = 4096, /) -> None: ...
    def __len__(self) -> int: ...
    def clear(self) -> None:
        """Drop all plans."""
    def values(self) -> list[Plan]:
        """Return all plans, in no particular order."""

class Method:
    """Method like ``base``, one of torch.Tensor, that calls the hook before it parses arguments."""

    __wrapped__: Callable[..., Any]
    def __init__(self, base: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def torch_function(
    func: Callable[..., Any], types: Any, args: tuple, kwargs: dict | None = None, /
) -> Any:
    """Run ``func`` on global tensors: the ``__torch_function__`` of GlobalTensor."""

def attach(local: Any, spec: Any, /) -> Any:
    """Turn the plain tensor ``local`` in place into the shard of a global tensor with ``spec``.

    Its class changes, so nothing else may refer to it. Returns ``local``.
    """

def gradient(leaf: Any, /) -> Any:
    """Return the gradient of ``leaf`` as a global tensor, or None.

    During backward it includes addends that still wait for their sum over ranks.
    """

def enter_function(function: Callable[..., Any], /) -> bool:
    """Make the builtin ``function`` of torch call the hook before it parses its arguments.

    It stays the same object. Returns False, and changes nothing, if its calling convention is not
    supported.
    """

def in_backward_of_shards(now: bool, /) -> bool:
    """Set whether this thread runs backward over global tensors; return the previous value.

    In such a backward, a NaN that anomaly mode finds does not raise on this rank alone. It is
    recorded for ``take_nan_found``.
    """

def take_nan_found() -> str:
    """Return anomaly mode's message for the first NaN in backward since the last call, or ""."""

def make_getter(descriptor: Any, /) -> Callable[[Any], Any]:
    """Return a function that reads a property of torch.Tensor from a global tensor's shard."""

def make_handle(fallback: Callable[..., Any], /) -> Callable[..., Any]:
    """Return a fast ``torch.overrides.handle_torch_function`` for calls with global tensors.

    It calls ``fallback``, torch's own, if another class has a ``__torch_function__`` in the call.
    """

def no_sequence(cls: type, /) -> None:
    """Make ``PySequence_Check`` false for instances of ``cls``, as for those of torch.Tensor."""

def on_first_tensor(function: Callable[[], None], /) -> None:
    """Call ``function`` once, before the first global tensor of this process is made."""

def original(builtin: Any, /) -> Any:
    """Return a copy of a builtin of torch that ``redirect`` does not affect; make it before."""

def redirect(
    builtin: Any,
    handler: Callable[..., Any],
    when: str,
    after: Callable[..., Any] | None,
    /,
) -> None:
    """Make calls of ``builtin`` run ``handler``, as ``torch_patches/redirect.py`` describes.

    ``when`` says which calls: "always", "global" or "graph".
    """

def redirect_class(cls: type, handler: Callable[..., Any], /) -> None:
    """Make ``cls(...)`` with a global tensor among its arguments call ``handler(cls, ...)``."""

def redirect_property(property: Any, handler: Callable[[Any, Any], Any], /) -> None:
    """Make the assignment of a global tensor to a plain tensor's property call ``handler``.

    It is called as ``handler(owner, value)``.
    """

def holds_global(value: Any, /) -> bool:
    """Return whether ``value`` is a global tensor, or a tuple, list or dict that contains one."""

def read_numbers_by(read: Callable[[Any], Any], /) -> None:
    """Make torch call ``read(tensor)`` where it reads a number from a global tensor.

    For example in ``torch.full((2,), x)``, where torch calls no ``__torch_function__``.
    """

def refuse_collectives(instead: str, /) -> None:
    """Make collectives of torch.distributed raise for global tensors.

    ``instead`` is the part of the message that says what to call instead.
    """

def set_aside() -> Any:
    """Switch off this thread's modes, hooks and profilers, all but autocast, and return them.

    Planning does this, so that they do not see the ops that it runs.
    """

def bring_back(before: Any, /) -> None:
    """Restore the modes, hooks and profilers that ``set_aside`` returned."""

def use(table: PlanTable, /) -> PlanTable:
    """Make this thread look plans up in ``table`` from now on; return the table used before.

    The first call sets the table of the whole process.
    """

def key_of(
    func: Callable[..., Any], args: tuple, kwargs: dict, general: bool, /
) -> tuple[bytes, tuple]:
    """Return the key of a call, (bytes, objects), by which plans are looked up; for tests.

    ``general`` asks for the key of plans that serve all sizes: it has layouts in place of specs.
    """

def forget_functions() -> None:
    """Drop the cached results of ``resolve``: which op each function of torch computes."""

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
    """Set the classes that the hook knows, and the Python functions and objects that it uses.

    ``csrc/bindings/dispatch/hook.h`` describes each.
    """

# -- leaf_module.cpp -------------------------------------------------------------------------------
# A leaf whose gradient is summed over ranks has a hook. The hook takes this rank's addend of the
# gradient, which waits in a *bucket*: gradients that are summed in one all-reduce. A *position* is
# the index of an addend in this thread's list of waiting addends.

def held_gradient(leaf: Any, /) -> Any:
    """Return the gradient of ``leaf`` without the addends that wait for their sum, or None."""

def set_gradient(leaf: Any, grad: Any, /) -> None:
    """Set the gradient of ``leaf`` without checks; its layout may differ from the leaf's."""

def assign_gradient(leaf: Any, value: Any, /) -> None:
    """Carry out ``leaf.grad = value`` of a user, by ``leaves.assign`` if necessary."""

def watch(leaf: Any, bucket: int, nbytes: int, /) -> None:
    """Give ``leaf`` the hook by which its gradients are summed over ranks, in ``bucket``.

    Args:
        leaf: the leaf.
        bucket: number of the bucket; -1 if this rank takes part in no sum.
        nbytes: bytes of the leaf's largest shard on any rank, so equal on all ranks.
    """

def watch_if_leaf(tensor: Any, /) -> None:
    """Call ``leaves.watch_leaf(tensor)`` if ``tensor`` requires grad and is a leaf.

    It does not touch the tensor's autograd nodes.
    """

def unwatch(leaf: Any, /) -> None:
    """Remove the hook of ``leaf``, so that torch adds its gradients as it computes them."""

def is_watched(leaf: Any, /) -> bool:
    """Return whether ``leaf`` has the hook that ``watch`` gives."""

def is_partial(leaf: Any, /) -> bool:
    """Return whether a ``.grad`` of ``leaf`` that has no spec yet is an addend, not a sum."""

def set_partial(leaf: Any, value: bool, /) -> None:
    """Set what ``is_partial`` returns for ``leaf``; without a hook nothing is done."""

def set_sync(value: bool, /) -> bool:
    """Set whether this thread sums gradients over ranks; return the previous value."""

def is_synced() -> bool:
    """Return whether this thread sums gradients over ranks: True outside of ``no_sync()``."""

def wait(leaf: Any, addend: torch.Tensor, replaces: bool, /) -> None:
    """Put ``addend`` into the bucket of ``leaf``, whose all-reduce starts once it is full.

    The sum is added to ``.grad``. With ``replaces``, the addend includes the present ``.grad``, and
    the sum replaces that.
    """

def wait_alone(leaf: Any, addend: torch.Tensor, /) -> None:
    """Start the all-reduce of the large ``addend`` alone, in its own memory.

    Nothing else may write to that memory.
    """

def hold(leaf: Any, addend: torch.Tensor, bucket: int, nbytes: int, /) -> int:
    """Add an addend that Python itself sends and adds to ``.grad``; return its position.

    It waits in ``bucket`` until ``launch_if_full`` or the end of backward. If ``bucket`` is
    negative, Python sends it at once. ``nbytes`` is its size, equal on all ranks.
    """

def launch_if_full(bucket: int, /) -> None:
    """Start sending ``bucket`` if its addends have enough bytes (``buckets.bucket_limit``)."""

def let_go(position: int, /) -> None:
    """Release the memory of the addend at ``position``, which Python has started to send."""

def take_back(position: int, /) -> bool:
    """Record that the sum of an addend has arrived; return whether Python is still to add it.

    It is not, if the leaf was given another gradient meanwhile.
    """

def launch_all() -> None:
    """Start sending all buckets that have addends, full or not."""

def accumulate(positions: list[int], flat: torch.Tensor, /) -> None:
    """Add the sums of the addends at ``positions`` to the gradients of their leaves.

    ``flat`` is the concatenation of the sums, in the same order.
    """

def waiting_for(leaf: Any, /) -> tuple[list[Any], bool, list[int]]:
    """Return (addends, replaces, positions) for the addends that wait for their sum.

    An addend that was sent, and whose memory is released, is None. ``replaces`` says whether the
    sum of one of them replaces the gradient of ``leaf`` (see ``wait``).
    """

def drop_waiting(leaf: Any, /) -> None:
    """Drop the waiting addends of ``leaf``: their sums will not be added to its gradient."""

def clear_waiting() -> None:
    """Drop all waiting addends of this thread, at the end of backward."""

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
    """Set the Python functions that the hooks of leaves call.

    ``csrc/bindings/dispatch/gradients/waiting.h`` describes each.
    """
