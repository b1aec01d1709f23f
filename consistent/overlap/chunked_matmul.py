"""Matrix products that overlap with the boxing of their operand or result, in chunks of rows.

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

from ..boxing.chunks import Chunk, cut, worth
from ..forms.native import load as native
from ..forms.native.reduce_shards import Epilogue, EpilogueInputs, reduce_shards, through_activation
from ..movement.boxed import box
from ..movement.run import begin, run_within
from ..movement.speeds import start_bytes
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from .symmetric_matmul import fused_over, gather_multiply, multiply_scatter

MOST_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Boxing:
    """A boxing that overlaps with a matrix product.

    ``src`` and ``dst`` are the specs before and after it, ``chunks`` is the number of chunks of
    rows in which it is sent, and ``activation`` is applied to the result of both.
    """

    src: TensorSpec
    dst: TensorSpec
    chunks: int
    activation: str = "none"

    @property
    def back(self) -> Boxing:
        """The boxing of the gradient in backward, from the dual of ``dst`` to that of ``src``."""
        return Boxing(self.dst.dual, self.src.dual, self.chunks)

    def cut(self) -> tuple[Chunk, ...]:
        """Return the chunks of rows in which this rank sends.

        There is one chunk on a rank outside the placement, which sends nothing, and on CUDA, where
        a stream runs kernels in order, so that a thread that sends would overlap with nothing.
        """
        at, placement = my_coordinate(self.src.placement), self.src.placement
        if at is None or placement.type != "cpu":
            return cut(self.src, self.dst, 1, at or (0,) * placement.ndim)
        return cut(self.src, self.dst, self.chunks, at)

    def overlaps(self) -> bool:
        """Return whether something is multiplied while something is sent, on this rank.

        If not, the product and the boxing are done one after the other.
        """
        return len(self.cut()) > 1 or fused_over(self.src, self.dst) is not None


def chunk_count(src: TensorSpec, dst: TensorSpec) -> int:
    """Return the number of chunks that is expected to be fastest, the same on every rank.

    It is used if the caller of a product gives none. On CPU there is more than one chunk only if
    each rank has a core to spare: where all cores are busy, nothing can overlap. On CUDA there is
    one chunk; there torch's fused ops overlap, where symmetric memory is enabled.
    """
    placement = src.placement
    if placement.type != "cpu" or my_coordinate(placement) is None:
        return 1
    most = worth(src, dst, MOST_CHUNKS, start_bytes(src.placement.type))
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
    return _finished(box(x, boxing.src, boxing.dst) @ w, boxing, bias)


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
    return _finished(box(x @ w, boxing.src, boxing.dst), boxing, bias)


def _finished(z: Tensor, boxing: Boxing, bias: Tensor | None) -> Tensor:
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
        finish = _Finish(boxing, bias, any(ctx.needs_input_grad))
        y, total, boxed = _box_multiply(boxing, x, w, finish)
        ctx.boxing = boxing
        ctx.save_for_backward(w, boxed, total)
        # Unused outputs then have the gradient None, and backward skips their work.
        ctx.set_materialize_grads(False)
        # ``total`` and ``boxed`` are outputs because backward saves them: autograd then tracks
        # them, and a double backward can differentiate through them.
        return y, total, boxed

    @staticmethod
    def backward(
        ctx: Any, at_y: Tensor | None, at_total: Tensor | None, at_boxed: Tensor | None
    ) -> tuple:
        boxing, (w, boxed, total), needs = ctx.boxing, ctx.saved_tensors, ctx.needs_input_grad
        # The gradient of y passes through the activation; that of ``total`` does not.
        grad, at_x = _before(boxing, total, at_y, at_total), None
        back = boxing.back
        # Only a double backward has a gradient of ``boxed``.
        if needs[1] and at_boxed is not None:
            at_x = box(at_boxed, back.src, back.dst)
        if grad is None:
            return None, at_x, None, None
        if needs[1]:
            at_x = _plus(at_x, multiply_box(back, grad, w.mT))
        return None, at_x, _of_weight(boxed, grad) if needs[2] else None, _of_bias(needs, grad)


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
        finish = _Finish(boxing, bias, any(ctx.needs_input_grad))
        y, total = _multiply_box(boxing, x, w, finish)
        ctx.boxing = boxing
        ctx.save_for_backward(x, w, total)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, at_y: Tensor | None, at_total: Tensor | None) -> tuple:
        boxing, (x, w, total), needs = ctx.boxing, ctx.saved_tensors, ctx.needs_input_grad
        grad = _before(boxing, total, at_y, at_total)
        if grad is None:
            return None, None, None, None
        at_x = at_w = None
        if needs[1] or needs[2]:
            # One boxing of the gradient serves x and w: the function also returns the boxed
            # gradient.
            at_x, _, grad_boxed = _BoxMultiply.apply(boxing.back, grad, w.mT, None)
            at_w = _of_weight(x, grad_boxed) if needs[2] else None
        return None, at_x, at_w, _of_bias(needs, grad)


# ---- the two ways, without autograd --------------------------------------------------------------


def box_multiply_once(
    boxing: Boxing, x: Tensor, w: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``(boxed x @ w + bias, boxed x)`` for shards, without autograd.

    Compiled steps call it, which have recorded forward and backward already. Tracers, the observers
    of a program, are not notified.
    """
    y, _, boxed = _box_multiply_shards(boxing, x, w, _Finish(boxing, bias, False))
    return y, boxed


def multiply_box_once(boxing: Boxing, x: Tensor, w: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return ``x @ w + addend``, boxed, for shards, without autograd.

    Compiled steps call it. ``addend`` has one number for each column. It is added on each rank,
    before the boxing. Tracers, the observers of a program, are not notified.
    """
    return _multiply_box_shards(boxing, x, w, _Finish(boxing, None, False), addend)[0]


def _box_multiply(
    boxing: Boxing, x: Tensor, w: Tensor, finish: _Finish
) -> tuple[Tensor, Tensor, Tensor]:
    """Notify tracers; return (activation(t), t, boxed x) for t = ``boxed x @ w + bias``."""
    x, _ = begin(x, boxing.src, boxing.dst)
    return _box_multiply_shards(boxing, x, w, finish)


def _box_multiply_shards(
    boxing: Boxing, x: Tensor, w: Tensor, finish: _Finish
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``_box_multiply`` without tracers: multiply each chunk of rows when it has arrived."""
    if over := fused_over(boxing.src, boxing.dst):
        boxed, product = gather_multiply(x, w, over)
        return *finish.made(product), boxed
    chunks = boxing.cut()
    boxed = x.new_empty(boxing.dst.local_shape(my_coordinate(boxing.dst.placement)))
    out = finish.room(boxed, w.shape[1])
    with BackgroundCalls() as background:
        # One background thread sends all chunks in this order, which is the same on every rank.
        arriving = [background.submit(_box_chunk, x, chunk, boxed) for chunk in chunks]
        for chunk, arrival in zip(chunks, arriving, strict=True):
            arrival.result()
            for rows in chunk.dst_rows:
                finish.chunk(_product(boxed[rows], w), out, (rows,))
    return *out, boxed


def _multiply_box(boxing: Boxing, x: Tensor, w: Tensor, finish: _Finish) -> tuple[Tensor, Tensor]:
    """Notify tracers; return (activation(t), t) for t = ``boxed(x @ w) + bias``."""
    x = x.detach()
    # ``begin`` needs the shape and dtype of a product that does not exist yet: one expanded element
    # has them without the memory.
    begin(x.new_empty(()).expand((*x.shape[:-1], w.shape[1])), boxing.src, boxing.dst)
    return _multiply_box_shards(boxing, x, w, finish)


def _multiply_box_shards(
    boxing: Boxing, x: Tensor, w: Tensor, finish: _Finish, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do ``_multiply_box`` without tracers: send each chunk of the product when it is made."""
    chunks = boxing.cut()
    if addend is None and (over := fused_over(boxing.src, boxing.dst)):
        return finish.made(multiply_scatter(x, w, over))
    dst = boxing.dst.local_shape(my_coordinate(boxing.dst.placement))
    out = finish.room(x.new_empty((*dst[:-1], 0)), dst[-1])
    with BackgroundCalls() as background:
        leaving = []
        for chunk in chunks:
            product = _product(_taken(x, chunk.src_rows), w, addend)
            leaving.append(background.submit(_finish_chunk, product, chunk, finish, out))
        for each in leaving:
            each.result()
    return out


def _box_chunk(x: Tensor, chunk: Chunk, boxed: Tensor) -> None:
    """Box one chunk of rows of ``x``, and write the result to its rows of ``boxed``."""
    _put(run_within(_taken(x, chunk.src_rows), chunk.src, chunk.dst), boxed, chunk.dst_rows)


def _finish_chunk(
    product: Tensor, chunk: Chunk, finish: _Finish, out: tuple[Tensor, Tensor]
) -> None:
    """Box one chunk of the product, apply bias and activation, and write its rows of ``out``."""
    finish.chunk(run_within(product, chunk.src, chunk.dst), out, chunk.dst_rows)


def _product(x: Tensor, w: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return ``x @ w + addend`` as a contiguous tensor, whatever the strides of ``x``."""
    out = x.new_empty((*x.shape[:-1], w.shape[1]))
    if addend is None:
        torch.mm(x.flatten(0, -2), w, out=out.flatten(0, -2))
    else:
        torch.addmm(addend, x.flatten(0, -2), w, out=out.flatten(0, -2))
    return out


def _taken(x: Tensor, places: Sequence[slice]) -> Tensor:
    """Return the rows ``places`` of ``x``, one slice after the other."""
    return x[places[0]] if len(places) == 1 else torch.cat([x[rows] for rows in places])


def _put(x: Tensor, out: Tensor, places: Sequence[slice]) -> None:
    """Write the rows of ``x``, in order, to the rows ``places`` of ``out``."""
    for part, rows in zip(x.split([r.stop - r.start for r in places]), places, strict=True):
        out[rows].copy_(part)


class _Finish:
    """Bias and activation after a product ``z``, for all rows at once or chunk by chunk.

    The results are ``(activation(z + bias), z + bias)``. The second is empty unless the gradient of
    an activation needs it: ``tracked`` says whether autograd records the product.
    """

    def __init__(self, boxing: Boxing, bias: Tensor | None, tracked: bool) -> None:
        self.activation, self.bias = boxing.activation, bias
        self.keeps = tracked and boxing.activation != "none"

    def room(self, like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return two uninitialized results with the rows of ``like``, for ``chunk`` to fill."""
        shape = (*like.shape[:-1], columns)
        return like.new_empty(shape), like.new_empty(shape if self.keeps else 0)

    def made(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(activation(z + bias), z + bias)`` for all rows of ``z``."""
        if self.bias is None and self.activation == "none":
            return z, z.new_empty(0)
        return native.reduce_shards(
            [z], 0, 0, z.shape[0],
            bias=self.bias, activation=self.activation, keep_total=self.keeps,
        )  # fmt: skip

    def chunk(self, z: Tensor, out: tuple[Tensor, Tensor], places: Sequence[slice]) -> None:
        """Compute both results for the chunk ``z``, and write them to its rows of ``out``."""
        y, total = self.made(z)
        _put(y, out[0], places)
        if self.keeps:
            _put(total, out[1], places)


# ---- gradients -----------------------------------------------------------------------------------


def _before(
    boxing: Boxing, total: Tensor, at_y: Tensor | None, at_total: Tensor | None
) -> Tensor | None:
    """Return the gradient of ``total``, the value before the activation; None if there is none.

    Args:
        boxing: the boxing whose ``activation`` was applied.
        total: the value before the activation.
        at_y: gradient of the activation's result, or None.
        at_total: gradient that ``total`` itself got in a double backward, or None.
    """
    if at_y is not None and boxing.activation != "none":
        at_y = through_activation(boxing.activation, total, at_y)
    return _plus(at_total, at_y)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return ``a + b``, where None counts as zero."""
    return b if a is None else a if b is None else a + b


def _of_weight(x: Tensor, grad: Tensor) -> Tensor:
    return x.flatten(0, -2).mT @ grad.flatten(0, -2)


def _of_bias(needs: Sequence[bool], grad: Tensor) -> Tensor | None:
    return grad.flatten(0, -2).sum(0) if needs[3] else None
