"""Matmuls that overlap with the boxing of their operand or result, in chunks of rows.

```
box, multiply     send 0 | send 1     | send 2     |                 x: src -> dst,  dst @ w
                         | multiply 0 | multiply 1 | multiply 2

multiply, box     multiply 0 | multiply 1 | multiply 2 |             x @ w: src -> dst
                             | send 0     | send 1     | send 2
```

Boxing (redistribution) is the communication that changes a layout. Each of the two is the backward
pass of the other. Bias and activation are also computed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirrored.background import BackgroundCalls, has_spare_cores

from ..boxing.chunks import Chunk, affordable_chunks, cut_into_chunks
from ..forms.native import load as native
from ..forms.native.reduce_shards import (
    Epilogue,
    EpilogueInputs,
    add_optional,
    reduce_shards,
    through_activation,
)
from ..movement.boxed import box
from ..movement.run import begin_boxing, run_within
from ..movement.speeds import start_bytes
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from .symmetric_matmul import fused_group_and_dim, gather_multiply, multiply_scatter

MAX_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Boxing:
    """A boxing that overlaps with a matmul.

    ``src`` and ``dst`` are the specs before and after it, ``chunks`` is the number of chunks of
    rows in which it is sent, and ``activation`` is applied to the result of matmul and boxing.
    """

    src: TensorSpec
    dst: TensorSpec
    chunks: int
    activation: str = "none"

    @property
    def backward_boxing(self) -> Boxing:
        """The boxing of the gradient in backward, from the dual of ``dst`` to that of ``src``."""
        return Boxing(self.dst.dual, self.src.dual, self.chunks)

    def row_chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks of rows in which this rank sends.

        There is one chunk on a rank outside the placement, which sends nothing, and on CUDA, where
        a stream runs kernels in order, so that a thread that sends would overlap with nothing.
        """
        coordinate, placement = my_coordinate(self.src.placement), self.src.placement
        if coordinate is None or placement.type != "cpu":
            return cut_into_chunks(self.src, self.dst, 1, coordinate or (0,) * placement.ndim)
        return cut_into_chunks(self.src, self.dst, self.chunks, coordinate)

    def overlaps(self) -> bool:
        """Return whether something is multiplied while something is sent, on this rank.

        If not, the matmul and the boxing are done one after the other.
        """
        return len(self.row_chunks()) > 1 or fused_group_and_dim(self.src, self.dst) is not None


def chunk_count(src: TensorSpec, dst: TensorSpec) -> int:
    """Return the number of chunks that is expected to be fastest, the same on every rank.

    It is used if the caller of a matmul gives none. On CPU there is more than one chunk only if
    each rank has a core to spare: where all cores are busy, nothing can overlap. On CUDA there is
    one chunk; there torch's fused ops overlap, where symmetric memory is enabled.
    """
    placement = src.placement
    if placement.type != "cpu" or my_coordinate(placement) is None:
        return 1
    most = affordable_chunks(src, dst, MAX_CHUNKS, start_bytes(src.placement.type))
    return most if most > 1 and has_spare_cores(tuple(placement.ranks.ravel().tolist())) else 1


def box_multiply(boxing: Boxing, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``activation(boxed x @ w + bias)``, boxing ``x`` while it is multiplied.

    Differentiable any number of times.

    Args:
        boxing: the boxing of ``x``, and the activation.
        x: this rank's shard, ``[..., k]`` under ``boxing.src``.
        w: this rank's shard, ``[k, n]``.
        bias: this rank's shard, ``[n]``.

    Returns:
        This rank's shard of the result, ``[..., n]``.
    """
    if boxing.overlaps():
        return _BoxMultiply.apply(boxing, x, w, bias)[0]
    return _add_bias_and_activate(box(x, boxing.src, boxing.dst) @ w, boxing, bias)


def multiply_box(boxing: Boxing, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``activation(boxed(x @ w) + bias)``, boxing the product while it is computed.

    Differentiable any number of times.

    Args:
        boxing: the boxing of the product, and the activation.
        x: this rank's shard, ``[..., k]``.
        w: this rank's shard, ``[k, n]``.
        bias: this rank's shard, ``[n]``, as for the result.

    Returns:
        This rank's shard of the result, ``[..., n]`` under ``boxing.dst``.
    """
    if boxing.overlaps():
        return _MultiplyBox.apply(boxing, x, w, bias)[0]
    return _add_bias_and_activate(box(x @ w, boxing.src, boxing.dst), boxing, bias)


def _add_bias_and_activate(z: Tensor, boxing: Boxing, bias: Tensor | None) -> Tensor:
    """Return ``activation(z + bias)``."""
    if bias is None and boxing.activation == "none":
        return z
    return reduce_shards([z], Epilogue(activation=boxing.activation), EpilogueInputs(bias))


class _BoxMultiply(torch.autograd.Function):
    """Autograd Function of ``box_multiply``; ``boxed`` is x after the boxing.

    ```
    forward    x ---> boxed      total = boxed @ w + bias      y = activation(total)
    backward   x <--- boxed      grad of total @ w.T           boxed.T @ grad of total -> of w
    ```

    It returns (y, total, boxed), so that a double backward can differentiate through all three.
    """

    @staticmethod
    def forward(
        ctx: Any, boxing: Boxing, x: Tensor, w: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias_activation = _BiasActivation(boxing, bias, any(ctx.needs_input_grad))
        y, total, boxed = _box_multiply(boxing, x, w, bias_activation)
        ctx.boxing = boxing
        ctx.save_for_backward(w, boxed, total)
        # Unused outputs then have the gradient None, and backward skips their work.
        ctx.set_materialize_grads(False)
        # ``total`` and ``boxed`` are outputs because backward saves them: autograd then tracks
        # them, and a double backward can differentiate through them.
        return y, total, boxed

    @staticmethod
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None, grad_boxed: Tensor | None
    ) -> tuple:
        boxing, (w, boxed, total), needs = ctx.boxing, ctx.saved_tensors, ctx.needs_input_grad
        # The gradient of y passes through the activation; that of ``total`` does not.
        grad, grad_x = _grad_before_activation(boxing, total, grad_y, grad_total), None
        back = boxing.backward_boxing
        # Only a double backward has a gradient of ``boxed``.
        if needs[1] and grad_boxed is not None:
            grad_x = box(grad_boxed, back.src, back.dst)
        if grad is None:
            return None, grad_x, None, None
        if needs[1]:
            grad_x = add_optional(grad_x, multiply_box(back, grad, w.mT))
        return (
            None,
            grad_x,
            _weight_grad(boxed, grad) if needs[2] else None,
            _bias_grad(needs, grad),
        )


class _MultiplyBox(torch.autograd.Function):
    """Autograd Function of ``multiply_box``; ``boxed`` is the product after the boxing.

    ```
    forward    product = x @ w      product ---> boxed      y = activation(boxed + bias)
    backward   grad @ w.T -> of x   grad    <--- of boxed   x.T @ grad -> of w
    ```
    """

    @staticmethod
    def forward(
        ctx: Any, boxing: Boxing, x: Tensor, w: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        bias_activation = _BiasActivation(boxing, bias, any(ctx.needs_input_grad))
        y, total = _multiply_box(boxing, x, w, bias_activation)
        ctx.boxing = boxing
        ctx.save_for_backward(x, w, total)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None) -> tuple:
        boxing, (x, w, total), needs = ctx.boxing, ctx.saved_tensors, ctx.needs_input_grad
        grad = _grad_before_activation(boxing, total, grad_y, grad_total)
        if grad is None:
            return None, None, None, None
        grad_x = grad_w = None
        if needs[1] or needs[2]:
            # One boxing of the gradient serves x and w: the function also returns the boxed
            # gradient.
            grad_x, _, grad_boxed = _BoxMultiply.apply(boxing.backward_boxing, grad, w.mT, None)
            grad_w = _weight_grad(x, grad_boxed) if needs[2] else None
        return None, grad_x, grad_w, _bias_grad(needs, grad)


# ---- the two ways, without autograd --------------------------------------------------------------


def box_multiply_once(
    boxing: Boxing, x: Tensor, w: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``(boxed x @ w + bias, boxed x)`` for this rank's shards, without autograd.

    Compiled steps call it, since their recorded ops include those of backward. Tracers, the
    observers of a program, are not notified.
    """
    y, _, boxed = _box_multiply_shards(boxing, x, w, _BiasActivation(boxing, bias, False))
    return y, boxed


def multiply_box_once(boxing: Boxing, x: Tensor, w: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return ``boxed(x @ w + addend)`` for this rank's shards, without autograd.

    Compiled steps call it. ``addend`` is a bias ``[n]`` that each rank adds before the boxing.
    Tracers, the observers of a program, are not notified.
    """
    return _multiply_box_shards(boxing, x, w, _BiasActivation(boxing, None, False), addend)[0]


def _box_multiply(
    boxing: Boxing, x: Tensor, w: Tensor, bias_activation: _BiasActivation
) -> tuple[Tensor, Tensor, Tensor]:
    """Notify tracers; return (activation(t), t, boxed x) for t = ``boxed x @ w + bias``."""
    x, _ = begin_boxing(x, boxing.src, boxing.dst)
    return _box_multiply_shards(boxing, x, w, bias_activation)


def _box_multiply_shards(
    boxing: Boxing, x: Tensor, w: Tensor, bias_activation: _BiasActivation
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``_box_multiply`` without tracers: multiply each chunk of rows when it has arrived."""
    if group_and_dim := fused_group_and_dim(boxing.src, boxing.dst):
        boxed, product = gather_multiply(x, w, group_and_dim)
        return *bias_activation.apply_to(product), boxed
    chunks = boxing.row_chunks()
    boxed = x.new_empty(boxing.dst.local_shape(my_coordinate(boxing.dst.placement)))
    out = bias_activation.empty_results(boxed, w.shape[1])
    with BackgroundCalls() as background:
        # One background thread sends all chunks in this order, which is the same on every rank.
        futures = [background.submit(_box_chunk, x, chunk, boxed) for chunk in chunks]
        for chunk, future in zip(chunks, futures, strict=True):
            future.result()
            for rows in chunk.dst_rows:
                bias_activation.write_chunk(_product(boxed[rows], w), out, (rows,))
    return *out, boxed


def _multiply_box(
    boxing: Boxing, x: Tensor, w: Tensor, bias_activation: _BiasActivation
) -> tuple[Tensor, Tensor]:
    """Notify tracers; return (activation(t), t) for t = ``boxed(x @ w) + bias``."""
    x = x.detach()
    # ``begin_boxing`` needs the shape and dtype of a product that does not exist yet: one expanded
    # element has them without the memory.
    begin_boxing(x.new_empty(()).expand((*x.shape[:-1], w.shape[1])), boxing.src, boxing.dst)
    return _multiply_box_shards(boxing, x, w, bias_activation)


def _multiply_box_shards(
    boxing: Boxing,
    x: Tensor,
    w: Tensor,
    bias_activation: _BiasActivation,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do ``_multiply_box`` without tracers: send each chunk of ``x @ w`` when it is computed."""
    chunks = boxing.row_chunks()
    if addend is None and (group_and_dim := fused_group_and_dim(boxing.src, boxing.dst)):
        return bias_activation.apply_to(multiply_scatter(x, w, group_and_dim))
    shape = boxing.dst.local_shape(my_coordinate(boxing.dst.placement))
    out = bias_activation.empty_results(x.new_empty((*shape[:-1], 0)), shape[-1])
    with BackgroundCalls() as background:
        futures = []
        for chunk in chunks:
            product = _product(_select_rows(x, chunk.src_rows), w, addend)
            futures.append(background.submit(_finish_chunk, product, chunk, bias_activation, out))
        for future in futures:
            future.result()
    return out


def _box_chunk(x: Tensor, chunk: Chunk, boxed: Tensor) -> None:
    """Box one chunk of rows of ``x``, and write the result to its rows of ``boxed``."""
    _write_rows(
        run_within(_select_rows(x, chunk.src_rows), chunk.src, chunk.dst), boxed, chunk.dst_rows
    )


def _finish_chunk(
    product: Tensor, chunk: Chunk, bias_activation: _BiasActivation, out: tuple[Tensor, Tensor]
) -> None:
    """Box one chunk of the product, apply bias and activation, and write its rows of ``out``."""
    bias_activation.write_chunk(run_within(product, chunk.src, chunk.dst), out, chunk.dst_rows)


def _product(x: Tensor, w: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return ``x @ w + addend`` (a bias) as a contiguous tensor, whatever the strides of ``x``."""
    out = x.new_empty((*x.shape[:-1], w.shape[1]))
    if addend is None:
        torch.mm(x.flatten(0, -2), w, out=out.flatten(0, -2))
    else:
        torch.addmm(addend, x.flatten(0, -2), w, out=out.flatten(0, -2))
    return out


def _select_rows(x: Tensor, row_slices: Sequence[slice]) -> Tensor:
    """Return the rows of ``x`` in ``row_slices``, one slice after the other."""
    return x[row_slices[0]] if len(row_slices) == 1 else torch.cat([x[rows] for rows in row_slices])


def _write_rows(x: Tensor, out: Tensor, row_slices: Sequence[slice]) -> None:
    """Write the rows of ``x``, in order, to the rows ``row_slices`` of ``out``."""
    for part, rows in zip(x.split([r.stop - r.start for r in row_slices]), row_slices, strict=True):
        out[rows].copy_(part)


class _BiasActivation:
    """Bias and activation after a matmul with result ``z``, for all rows at once or by chunks.

    The results are ``(activation(z + bias), z + bias)``. The second is empty unless the gradient of
    an activation needs it: ``tracked`` says whether autograd records the matmul.
    """

    def __init__(self, boxing: Boxing, bias: Tensor | None, tracked: bool) -> None:
        self.activation, self.bias = boxing.activation, bias
        self.keeps = tracked and boxing.activation != "none"

    def empty_results(self, like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return two uninitialized results with the rows of ``like``, for ``write_chunk``."""
        shape = (*like.shape[:-1], columns)
        return like.new_empty(shape), like.new_empty(shape if self.keeps else 0)

    def apply_to(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(activation(z + bias), z + bias)`` for all rows of ``z``."""
        if self.bias is None and self.activation == "none":
            return z, z.new_empty(0)
        return native.reduce_shards(
            [z], 0, 0, z.shape[0],
            bias=self.bias, activation=self.activation, keep_total=self.keeps,
        )  # fmt: skip

    def write_chunk(
        self, z: Tensor, out: tuple[Tensor, Tensor], row_slices: Sequence[slice]
    ) -> None:
        """Compute both results for the chunk ``z``, and write them to its rows of ``out``."""
        y, total = self.apply_to(z)
        _write_rows(y, out[0], row_slices)
        if self.keeps:
            _write_rows(total, out[1], row_slices)


# ---- gradients -----------------------------------------------------------------------------------


def _grad_before_activation(
    boxing: Boxing, total: Tensor, grad_y: Tensor | None, grad_total: Tensor | None
) -> Tensor | None:
    """Return the gradient of ``total``, the value before the activation; None if there is none.

    Args:
        boxing: the boxing whose ``activation`` was applied.
        total: the value before the activation.
        grad_y: gradient of the activation's result, or None.
        grad_total: gradient that ``total`` itself got in a double backward, or None.
    """
    if grad_y is not None and boxing.activation != "none":
        grad_y = through_activation(boxing.activation, total, grad_y)
    return add_optional(grad_total, grad_y)


def _weight_grad(x: Tensor, grad: Tensor) -> Tensor:
    return x.flatten(0, -2).mT @ grad.flatten(0, -2)


def _bias_grad(needs: Sequence[bool], grad: Tensor) -> Tensor | None:
    return grad.flatten(0, -2).sum(0) if needs[3] else None
