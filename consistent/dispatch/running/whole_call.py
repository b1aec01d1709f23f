"""User code that torch calls as one op, such as a ``torch.autograd.Function`` or a custom op.

Scripted functions count, too. Such code has no rule and may read anything, so every rank runs it on
whole plain tensors. Its backward may not be linear in the gradient, so backward also gets whole
gradients. Global tensors that the code reaches other than by its arguments stay global inside
(``user_code``), and so do results computed from them:

```
forward    x: S  --gather-->  whole  --the call-->  whole  --spread-->  y: B
backward   dx: S  <--slice--  whole  <--the call--  whole  <--sum over ranks--  dy: P
```

If the code writes to an argument in place, the value ends up in the tensor that the caller passed,
whether or not autograd counts the write: numpy, raw pointers and ``x.data`` write without its
knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from mirrored.transports.base.unseen import hidden_from_modes

from ...forms.random import generator
from ...movement import check_mode, plain_values
from ...movement.differentiable import copy_part_, gather, shard_of_plain
from ...movement.grad_mode import records
from ...movement.world import my_coordinate
from ...rules.signature import Call, Operand
from ...spec import B, Layout, Placement, TensorSpec
from ...spec.tracer import callbacks
from ..plans.arguments import collect, with_tensors
from ..plans.shards import adopt, attach, common_placement, is_global, plain
from .moved_views import refresh
from .on_shards import OnShards
from .outside_ranks import announce_result, map_values
from .user_code import UserCall, begin_user_call, running_user_call
from .writes import count_write

_Tensor = torch.Tensor

_ON_PLAN, _ON_OP_BEGIN = callbacks("on_plan"), callbacks("on_op_begin")
_ON_OP_END, _WATCH_WRITES = callbacks("on_op_end"), callbacks("watch_writes")


@dataclass(frozen=True, slots=True)
class _ReturnedOperand:
    """Placeholder in the result of a call for an operand that the call returned itself.

    ``index`` is that of the operand. It is replaced by the caller's own tensor in the end.
    """

    index: int


class _WrittenOperand(NamedTuple):
    """An operand that the call modified in place.

    Attributes:
        index: the position of the operand.
        whole: its value after the call, which ran on whole (gathered) tensors.
        counted: whether the write has raised autograd's version counter.
    """

    index: int
    whole: torch.Tensor
    counted: bool


def call_whole(
    name: str,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    marked: Sequence[tuple[int, str]] | None = None,
) -> Any:
    """Call ``run``, user code without a rule, on whole plain tensors on every rank.

    The ranks are those of the placement. Global operands are gathered before; plain tensors in the
    result become B tensors.

    Args:
        name: name of the function, for messages.
        run: the function.
        args: positional arguments of the call.
        kwargs: named arguments of the call.
        marked: (position, name) of the arguments that ``run`` declares to write to, or None if it
            declares nothing, so that writes must be found by comparing values.
    """
    operands: list[Any] = []
    collect((args, kwargs), operands)
    placement = common_placement(name, operands)
    plan = _begin_call(name, run, operands, placement)
    declared = None if marked is None else _declared_writes(marked, args, kwargs, operands)
    # Outside the placement plain operands become meta shards, since the code does not run there.
    sources = [refresh(adopt(x, placement, name)) if plan.outside else refresh(x) for x in operands]
    user_call = begin_user_call(name, placement)

    def call() -> tuple:
        out, written_operands = _run_on_whole(
            partial(_run_user_code, user_call, run), args, kwargs, sources, declared
        )
        return out, written_operands, generator.get_state().counter

    if user_call.is_followed:
        follow = announce_result(placement.first_rank, plan.outside)
        out, written_operands, counter = follow(call, [plain(x) for x in sources])
        # Ranks that did not run the code advance their random state by as much.
        generator.advance_to(counter)
    else:
        out, written_operands, _ = call()
    for operand in written_operands:
        _write_back(operands[operand.index], operand)
    specs: list[TensorSpec] = []
    result = _to_global(out, plan, operands, specs)
    for notify in _ON_OP_END:
        global_operands = [x for x in operands if is_global(x)]
        notify(plan, global_operands, result, [x._spec for x in global_operands], specs)
    return result


def _begin_call(
    name: str, run: Callable[..., Any], operands: list, placement: Placement
) -> OnShards:
    """Notify tracers of the call, compare its plain operands between ranks; return its plan."""
    check_mode.set_current_op(name)
    plan = _plan_for_tracers(name, run, operands, placement)
    for notify in _ON_OP_BEGIN:
        notify(plan)
    plain_tensors = [x for x in operands if not is_global(x)]
    plain_values.compare_plain(
        name, plain_tensors, placement, (name, *((x.dtype, x.ndim) for x in plain_tensors))
    )
    return plan


def _plan_for_tracers(
    name: str, run: Callable[..., Any], operands: list, placement: Placement
) -> OnShards:
    """Make a plan for tracers that watch plans. It describes the call, and is not run."""
    specs = [x._spec for x in operands if is_global(x)]
    call = Call(name, (), {}, tuple(Operand(i, spec) for i, spec in enumerate(specs)))
    plan, whole = OnShards(name, run, call, placement), Layout.whole(placement)
    plan.boxes = tuple((i, whole) for i, spec in enumerate(specs) if spec.layout is not whole)
    plan.outside = my_coordinate(placement) is None
    for notify in _ON_PLAN:
        notify(plan)
    return plan


def _declared_writes(
    marked: Sequence[tuple[int, str]], args: tuple, kwargs: dict, operands: list
) -> frozenset[int]:
    """Return the indices, among ``operands``, of the arguments that ``marked`` names.

    ``marked`` is as in ``call_whole``.
    """
    written: list[Any] = []
    for position, name in marked:
        collect((args[position] if position < len(args) else kwargs.get(name),), written)
    ids = set(map(id, written))
    return frozenset(i for i, x in enumerate(operands) if id(x) in ids)


def _run_on_whole(
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    sources: list,
    declared: frozenset[int] | None,
) -> tuple:
    """Gather the operands ``sources``, call ``run`` on them; return (result, operands written to).

    ``declared`` are the indices of the operands that the call declares to write to, or None if it
    declares nothing. Operands in the result are ``_ReturnedOperand``.
    """
    gathered: dict[int, torch.Tensor] = {}
    for x in sources:  # a tensor that is passed twice is the same object twice inside, too
        if id(x) not in gathered:
            gathered[id(x)] = _gather_whole(x)
    whole_operands = [gathered[id(x)] for x in sources]
    watched: dict[int, _WatchedOperand] = {}
    for i, x in enumerate(whole_operands):
        if id(x) not in watched:
            watched[id(x)] = _WatchedOperand(
                i, x, sources[i], None if declared is None else i in declared
            )
    args, kwargs = with_tensors(args, kwargs, whole_operands)
    out = run(*args, **kwargs)
    places = {key: _ReturnedOperand(operand.index) for key, operand in watched.items()}
    result = map_values(out, _Tensor, lambda x: places.get(id(x), x))
    written = (operand.written() for operand in watched.values())
    return result, tuple(operand for operand in written if operand is not None)


def _run_user_code(user_call: UserCall, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run`` as the user code of ``user_call``, and gather global tensors in its result.

    Global tensors are gathered only if some ranks do not run the code, since these ranks are sent
    only the shapes of the results.
    """
    with running_user_call(user_call), _explain_recorded_errors(user_call):
        out = run(*args, **kwargs)
    if not user_call.is_followed:
        return out
    return map_values(out, _Tensor, lambda x: gather(plain(x), x._spec) if is_global(x) else x)


@contextmanager
def _explain_recorded_errors(user_call: UserCall) -> Iterator[None]:
    """Explain an error of user code that a recorder runs on meta tensors, which have no values."""
    try:
        yield
    except Exception as error:
        if not user_call.is_recorded:
            raise
        raise RuntimeError(
            f"{user_call.name}: {type(error).__name__} as it was recorded, which runs it on meta "
            f"tensors: they have shapes and no values. It says: {error}\n"
            "  If its code reads memory or values, make it an op that tells its shapes: "
            "torch.library.custom_op and its register_fake and register_autograd."
        ) from error


class _WatchedOperand:
    """A gathered operand, watched to find out whether the call writes to it.

    Args:
        index: index of the operand.
        whole: its gathered value, which the call gets.
        source: the operand itself, a global or plain tensor.
        marked: whether the call declares to write to it; None if it declares nothing.
    """

    def __init__(self, index: int, whole: torch.Tensor, source: Any, marked: bool | None) -> None:
        self.index, self._whole, self._version_before = index, whole, _version_of(whole)
        copied = whole.layout is torch.strided and not whole.is_meta and _is_copy(whole, source)
        self._is_declared = copied and bool(marked)
        # Without a declaration only a comparison of values shows a write. `unseen` keeps the ops of
        # the comparison out of the user's modes. A later step may write where this one did not, so
        # a recorder of steps watches the ops that write instead of the values.
        self._value_before, self._write_watches = None, []
        if copied and marked is None:
            self._write_watches = [watch(whole) for watch in _WATCH_WRITES]
            with hidden_from_modes():
                self._value_before = whole.data.clone()

    def written(self) -> _WrittenOperand | None:
        """Return this operand as a ``_WrittenOperand`` if the call has written to it, else None."""
        counted = _version_of(self._whole) != self._version_before
        if counted or self._is_declared or self._differs():
            return _WrittenOperand(self.index, self._whole, counted)
        return None

    def _differs(self) -> bool:
        if self._value_before is None:
            return False
        if any(is_written() for is_written in self._write_watches):
            return True
        with hidden_from_modes():
            return not torch.equal(_bits(self._whole), _bits(self._value_before))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``x``, to compare values bit by bit, so that a NaN equals itself."""
    return x.data.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _is_copy(whole: torch.Tensor, source: Any) -> bool:
    """Return whether ``whole``, gathered from ``source``, is in memory of its own.

    If it is, a write into ``whole`` must be copied back into ``source``.
    """
    if not is_global(source):
        return False
    if source._moved_view:
        return True
    return whole.untyped_storage()._cdata != plain(source).untyped_storage()._cdata


def _gather_whole(x: Any) -> torch.Tensor:
    if not is_global(x):
        return x
    if not torch.is_inference_mode_enabled():
        return gather(x, x._spec)
    # Tensors made in inference mode have no version counter, which would hide writes.
    with torch.inference_mode(False), torch.no_grad():
        return gather(x, x._spec)


def _version_of(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _write_back(x: Any, written: _WrittenOperand) -> None:
    """Write the value that the call wrote into the global operand ``x``.

    A plain operand was passed to the call itself, and has the value already.
    """
    if not is_global(x):
        return
    if not written.counted:
        with torch.no_grad():
            # Through `.data`, so that autograd does not count this write either.
            _write_whole(x, plain(x).data, written.whole.detach())
    else:
        _write_whole(x, x, written.whole)


def _write_whole(x: Any, shard: Any, whole: torch.Tensor) -> None:
    """Write ``whole`` into the global operand ``x``.

    ``shard`` is ``x`` itself, or an alias of its shard through which autograd counts no write.
    """
    if x._moved_view:
        spec = _broadcast_spec(x._spec.placement, whole)
        x.copy_(attach(shard_of_plain(whole, spec, alias=True), spec))
    else:
        copy_part_(shard, whole, x._spec)
        count_write(x)


def _broadcast_spec(placement: Placement, x: torch.Tensor) -> TensorSpec:
    return TensorSpec.of(placement, (B,) * placement.ndim, x.shape, x.dtype)


def _to_global(out: Any, plan: OnShards, operands: list, specs: list[TensorSpec]) -> Any:
    """Turn the tensors in the result ``out`` into B tensors, and placeholders into operands.

    ``operands`` are those of the call. The specs of the new tensors are appended to ``specs``.
    """

    def attach_one(x: torch.Tensor) -> Any:
        if x.__class__ is not _Tensor:
            return x
        spec = _broadcast_spec(plan.placement, x)
        specs.append(spec)
        if plan.outside and not x.is_meta:  # happens while a program is recorded
            x = torch.empty_like(x, device="meta")
        tracked = records((x,)) and not plan.outside
        return attach(shard_of_plain(x, spec, alias=True) if tracked else x, spec)

    out = map_values(out, _Tensor, attach_one)
    return map_values(out, _ReturnedOperand, lambda place: operands[place.index])
