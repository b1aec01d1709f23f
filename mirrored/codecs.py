"""Codecs: how the numbers of a message are written in fewer bytes, and read again.

```
"bf16"   2 bytes a number    rounded to bfloat16
"int8"   1 byte a number     and a float32 scale for each block of 256: number = scale * integer
"fp8"    1 byte a number     the same, with float8_e4m3fn for the integer
```

A message of n numbers by blocks is ``4 * ceil(n / 256) + n`` bytes: the scales, and then the
numbers. What a rank reads depends on the bytes alone, so ranks that read the same bytes have the
same bits. A block that holds a NaN, an infinity or a number beyond float32 is read as NaN whole:
it is never taken for finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from .reduction import accumulated_in, ordered_reduce
from .transports import _C  # noqa: F401  # pyright: ignore # it registers torch.ops.mirrored

BLOCK = 256
_SCALE_BYTES = 4


class Codec(Protocol):
    """Writes floats as bytes, and reads them again."""

    @property
    def name(self) -> str:
        """What a plan calls it."""
        ...

    def nbytes(self, n: int) -> int:
        """How many bytes ``n`` numbers are written in."""
        ...

    def write(self, x: Tensor, unsent: Tensor | None = None) -> Tensor:
        """The numbers of ``x``, in order, as a uint8 tensor of ``nbytes(x.numel())``.

        With ``unsent``, of x's shape and dtype, those of ``x + unsent``. What the message leaves
        out of them is in ``unsent`` then; 0 where it is not finite, or one number that overflows
        would spoil all that follow.
        """
        ...

    def read(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        """The sum, in order, of what messages of ``n`` numbers say, as a new tensor with one
        dim."""
        ...


@dataclass(frozen=True)
class Rounded:
    """Each number by itself in a shorter float."""

    name: str
    dtype: torch.dtype

    def nbytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def write(self, x: Tensor, unsent: Tensor | None = None) -> Tensor:
        total = _total(x, unsent)
        said = total.to(self.dtype)
        if unsent is not None:
            keep_rest(unsent, total, said)
        return said.reshape(-1).view(torch.uint8)

    def read(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        return _summed([_as(message, self.dtype) for message in messages], dtype)


@dataclass(frozen=True)
class Blocks:
    """Numbers of one byte, and for each block of them the float32 by which they are multiplied.

    This is one pass of native code, csrc/peer/blocks_cpu.cpp and blocks.cu. Ops of torch give the
    same bits, for GPUs where that was built without CUDA.
    """

    name: str
    dtype: torch.dtype
    largest: float  # what the largest number of a block is written as

    def nbytes(self, n: int) -> int:
        return n + _SCALE_BYTES * -(-n // BLOCK)

    def write(self, x: Tensor, unsent: Tensor | None = None) -> Tensor:
        if not _is_native(x):
            return self._write_by_ops(x, unsent)
        message, rest = torch.ops.mirrored.write_blocks(x, unsent, self.name)
        if unsent is not None:
            unsent.copy_(rest)
        return message

    def read(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        if not _is_native(messages[0]):
            return self._read_by_ops(messages, n, dtype)
        return torch.ops.mirrored.read_blocks(messages, n, dtype, self.name)

    def _write_by_ops(self, x: Tensor, unsent: Tensor | None) -> Tensor:
        total = _total(x, unsent)
        parts = [self._encoded(part) for part in _blocks(total.reshape(-1).float())]
        message = torch.cat(
            [x.view(-1).view(torch.uint8) for x in (*_first(parts), *_second(parts))]
        )
        if unsent is not None:
            keep_rest(unsent, total, self._decoded(message, total.numel()).view(total.shape))
        return message

    def _read_by_ops(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        return _summed([self._decoded(message, n) for message in messages], dtype)

    def _encoded(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """(scales, numbers) of a matrix whose rows are blocks."""
        scale = block.abs().amax(1, keepdim=True) / self.largest
        scale = scale.masked_fill(~torch.isfinite(scale), torch.nan)
        # Beside a scale that is too small for a float32, or nearly, numbers may be too large.
        number = (block / scale.masked_fill(scale == 0, 1)).clamp_(-self.largest, self.largest)
        number = number.masked_fill_(scale.isnan(), 0)
        return scale, (number if self.dtype.is_floating_point else number.round_()).to(self.dtype)

    def _decoded(self, message: Tensor, n: int) -> Tensor:
        """The n numbers of a message, in float32."""
        scales, numbers = message.split([message.numel() - n, n])
        rows = zip(_blocks(numbers.view(self.dtype)), _rows(_as(scales, torch.float32), n))
        return torch.cat([(x.float() * scale).view(-1) for x, scale in rows])


@cache
def _has_kernels() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("mirrored::write_blocks", "CUDA")


def _is_native(x: Tensor) -> bool:
    return not x.is_cuda or _has_kernels()


def _summed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    wide = [part.to(accumulated_in(dtype)) for part in parts]
    return ordered_reduce(wide).to(dtype)


def _total(x: Tensor, unsent: Tensor | None) -> Tensor:
    return x if unsent is None else x.to(accumulated_in(x.dtype)) + unsent


def keep_rest(unsent: Tensor, total: Tensor, said: Tensor) -> None:
    """Let ``unsent`` be what ``said`` leaves out of ``total``; 0 where that is not finite."""
    unsent.copy_((total - said.to(total.dtype)).nan_to_num_(0.0, 0.0, 0.0))


def _blocks(flat: Tensor) -> list[Tensor]:
    """``flat`` as a matrix whose rows are whole blocks, and one of the rest, if there is one."""
    whole = flat.numel() // BLOCK * BLOCK
    parts = [flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)]
    return [part for part in parts if part.numel()] or [flat.view(0, BLOCK)]


def _rows(scales: Tensor, n: int) -> Sequence[Tensor]:
    """The scales of each matrix that ``_blocks`` gives of ``n`` numbers, as a column."""
    whole = n // BLOCK
    parts = [scales[:whole].view(-1, 1), scales[whole:].view(-1, 1)]
    return [part for part in parts if part.numel()] or [scales.view(0, 1)]


def _first(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [first for first, _ in pairs]


def _second(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [second for _, second in pairs]


def _as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of ``dtype``, which may not begin at any byte."""
    aligned = message.storage_offset() % dtype.itemsize == 0
    return (message if aligned else message.clone()).view(dtype)


CODECS: dict[str, Codec] = {
    "bf16": Rounded("bf16", torch.bfloat16),
    "int8": Blocks("int8", torch.int8, 127.0),
    "fp8": Blocks("fp8", torch.float8_e4m3fn, 448.0),
}
"""By the names that plans give them."""
