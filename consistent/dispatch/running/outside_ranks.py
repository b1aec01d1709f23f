"""Ways in which ranks outside a placement follow an op: its shapes and its autograd graph.

Mostly they run the op too, on ``meta`` tensors. Three kinds of ops need more:

* the result is known only by running the op (``nonzero``, ``x[mask]``, ``unique``, ``equal``): the
  first rank of the placement announces it, tensors by their shapes;
* torch has no ``meta`` kernel of the op, and the rule gives the shapes (``ctc_loss``): meta tensors
  of these shapes replace the result;
* the backward pass of torch's op needs values (``x[mask] = v``, ``index_fill``): a node that passes
  gradients of the correct shapes replaces the op's node.

A process that records a program follows it in the same way, but receives no announcement: there a
recorder gives the shapes, if it knows the values that decide them (``follow_by_values``).

A ``Follow`` is a function that a plan calls in place of just computing. Its arguments are the
function that computes the op, and the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ...movement.grad_mode import records, tracks
from ...movement.sparse_parts import MemoryLayout
from ...movement.world import excludes_others
from ...spec import TensorSpec
from ...spec.tracer import callbacks
from ..plans.shards import plain
from .agreed import deserialize_error, serialize_error

Compute = Callable[[], Any]
Tensors = Sequence[torch.Tensor]
Follow = Callable[[Compute, Tensors], Any]
_SHAPES_OF = callbacks("shapes_of")
_is_alias_of = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype, requires_grad and layout (dense or sparse) of a tensor, without its values.

    Sent to ranks outside the placement, which make a meta tensor from it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: MemoryLayout = MemoryLayout()


def announce_result(first_rank: int, outside: bool) -> Follow:
    """Return a ``Follow`` by which the placement's first rank sends the result to ranks outside.

    Tensors are sent as ``TensorMeta``, without values. The ``Follow`` is a collective of all ranks
    of the world, those inside the placement included. ``outside`` says whether this rank is
    outside.
    """

    def follow(compute: Compute, tensors: Tensors) -> Any:
        if excludes_others():  # ranks outside do not follow this op, so nothing is sent to them
            return compute()
        transport = current()
        out, note, error = None, None, None
        try:
            out = None if outside else compute()
        except Exception as raised:  # either all ranks of the placement raise it, or none does
            error = raised
        if transport.rank == first_rank and error is None:
            note = map_values(out, torch.Tensor, lambda x: _tensor_meta(x, x.requires_grad))
        message = note, b"" if error is None else serialize_error(error)
        note, error_note = gather_from_ranks(message)[first_rank]
        if error is not None:
            raise error
        if error_note:
            raise deserialize_error(error_note)
        return _meta_results(note, tensors) if outside else out

    return follow


def follow_by_values(
    name: str, call: tuple[Callable[..., Any], tuple, dict], compute: Compute, tensors: Tensors
) -> Any:
    """Follow an op whose result's shape depends on values, while a program is recorded.

    Recording has no values, so a recorder that knows them is asked for the shapes. ``name`` is the
    op, ``call`` the function with its arguments, as the program passed them; ``compute`` and
    ``tensors`` are the arguments of every ``Follow``.

    Raises:
        RuntimeError: no recorder knows the values that decide the shapes of the result.
    """
    needs_grad = records(tensors)
    for shapes_of in reversed(_SHAPES_OF):
        outputs = shapes_of(*call)
        if outputs is not None:
            meta = map_values(
                outputs, torch.Tensor, lambda x: _tensor_meta(x, needs_grad and _has_gradients(x))
            )
            return _meta_results(meta, tensors)
    try:
        return run_on_meta(compute, tensors)
    except Exception as error:
        if not isinstance(error, NotImplementedError) and "meta" not in str(error):
            raise  # the op refuses the call, whatever the values are
        raise RuntimeError(
            f"{name}: the shape of its result depends on values of a tensor.\n  {current().why}"  # type: ignore[attr-defined]
        ) from error


def run_on_meta(compute: Compute, tensors: Tensors) -> Any:
    """Run the op on meta tensors, and return plain results; a ``Follow``."""
    # Torch may save what an op returns for its backward. If that were global, meta kernels written
    # in Python would read its logical shape.
    return map_values(compute(), torch.Tensor, plain)


def write_on_meta(compute: Compute, tensors: Tensors) -> Any:
    """Follow an op that only writes to its first operand, mostly without running it; a ``Follow``.

    A meta tensor has no values to write, so without gradients it is enough to increment the version
    of the operand. Running the op would be slow: torch has written the meta kernels of most
    optimizers' ops in Python. The op does run if it may refuse its operands for something that
    their specs, and so the plan, do not show: their strides, their sizes or shared memory.
    """
    target, *others = tensors
    if any(x.ndim and x.shape != target.shape for x in others):
        # Some meta kernels, such as that of ``eq_``, do not refuse such operands.
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        if shape != target.shape:
            raise too_small(target.shape, shape)
        return run_on_meta(compute, tensors)
    if (
        tracks(tensors)
        or target.is_inference()
        or not target.is_contiguous()
        or any(x is not target and _is_alias_of(x, target) for x in others)
    ):
        return run_on_meta(compute, tensors)
    torch.autograd.graph.increment_version(target)
    return target


def too_small(target: Sequence[int], result: Sequence[int]) -> RuntimeError:
    """Return torch's error for an in-place op whose result does not fit into its target.

    ``target`` and ``result`` are their shapes.
    """
    return RuntimeError(
        f"output with shape {list(target)} doesn't match the broadcast shape {list(result)}"
    )


def run_with_stand_in_node(compute: Compute, tensors: Tensors) -> Any:
    """Run the op on meta tensors, with an autograd node that replaces the op's own.

    Used if the backward of the op's own node would need values. The replacement passes on meta
    gradients of the correct shapes.
    """
    if not records(tensors):
        return run_on_meta(compute, tensors)
    with torch.no_grad():
        out = compute()
    outcome = map_values(out, torch.Tensor, lambda x: _tensor_meta(x, _has_gradients(x)))
    return _meta_results(outcome, tensors)


def write_with_stand_in_node(compute: Compute, tensors: Tensors) -> Any:
    """Do what ``run_with_stand_in_node`` does, for an op that writes to its first operand."""
    return (
        record_stand_in_node(compute, tensors)
        if records(tensors)
        else run_on_meta(compute, tensors)
    )


def record_stand_in_node(compute: Compute, tensors: Tensors) -> Any:
    """Record only the autograd node of an op that writes to its first operand; a ``Follow``.

    Nothing is computed. The node lets gradients reach all operands, as the op's own does.
    """
    target = tensors[0]
    if target.layout is not torch.strided:
        return target  # torch records no writes into sparse tensors
    meta = TensorMeta(tuple(target.shape), target.dtype, records(tensors))
    (stand_in,) = _meta_results((meta,), tensors)
    # `copy_` records a node through which gradients reach all operands, as for the op itself.
    return torch.Tensor.copy_(target, stand_in)


def make_planned_outputs(
    name: str, outs: Sequence[TensorSpec], differentiable: Sequence[bool]
) -> Follow:
    """Return a ``Follow`` that makes meta tensors with the specs ``outs`` and computes nothing.

    Used for ops without a meta kernel whose rule gives the outputs. ``differentiable`` says which
    outputs may require grad. The outputs are packed as torch's op ``name`` packs its results.
    """
    metas = [
        TensorMeta(
            spec.local_shape(None), spec.dtype, is_differentiable and spec.dtype.is_floating_point
        )
        for spec, is_differentiable in zip(outs, differentiable, strict=True)
    ]
    pack = getattr(torch.return_types, name, tuple)
    outcome = metas[0] if len(metas) == 1 else pack(metas)
    return lambda compute, tensors: _meta_results(outcome, tensors)


def _meta_results(outcome: Any, tensors: Tensors) -> Any:
    """Return ``outcome`` with each ``TensorMeta`` replaced by a meta tensor of that description.

    In the autograd graph the meta tensors depend on ``tensors``, the operands of the op.
    """
    metas: list[TensorMeta] = []
    map_values(outcome, TensorMeta, metas.append)
    stand_ins = iter(_StandIn.apply(tuple(metas), *map(plain, tensors)) if metas else ())
    return map_values(outcome, TensorMeta, lambda _: next(stand_ins))


class _StandIn(torch.autograd.Function):
    """Autograd node on ranks outside the placement, in place of the op's own.

    Forward makes meta tensors for ``metas``, backward meta gradients in the shapes of the operands.
    """

    @staticmethod
    def forward(ctx: Any, metas: tuple[TensorMeta, ...], *tensors: torch.Tensor) -> tuple:
        ctx.inputs = tuple(_tensor_meta(x, _has_gradients(x)) for x in tensors)
        results = tuple(m.layout.empty(m.shape, m.dtype) for m in metas)
        fixed = (x for x, m in zip(results, metas, strict=True) if not m.requires_grad)
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        # Through the same Function, so that backward can be differentiated again.
        input_grads = _StandIn.apply(ctx.inputs, *(x for x in grads if x is not None))
        needed = ctx.needs_input_grad[1:]
        return None, *(
            x if is_needed else None for x, is_needed in zip(input_grads, needed, strict=True)
        )


def _tensor_meta(x: torch.Tensor, requires_grad: bool) -> TensorMeta:
    return TensorMeta(tuple(x.shape), x.dtype, requires_grad, MemoryLayout.of(x))


def _has_gradients(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def map_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to each instance of ``kind`` inside it.

    ``value`` may be nested tuples, lists and dicts, which keep their types.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple of the user's
        return value._make(map_values(item, kind, change) for item in value)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, tuple | list):
        return type(value)([map_values(item, kind, change) for item in value])
    if isinstance(value, dict):
        return {name: map_values(item, kind, change) for name, item in value.items()}
    return value
