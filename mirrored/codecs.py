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
from typing import Protocol

import torch
from torch import Tensor

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

    def encode(self, x: Tensor) -> Tensor:
        """The numbers of ``x``, in order, as a uint8 tensor of ``nbytes(x.numel())``."""
        ...

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The ``n`` numbers that ``message`` was written from, rounded, as a new tensor with one
        dim."""
        ...


@dataclass(frozen=True)
class Rounded:
    """Each number by itself in a shorter float."""

    name: str
    dtype: torch.dtype

    def nbytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return x.reshape(-1).to(self.dtype).view(torch.uint8)

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return _as(message, self.dtype).to(dtype, copy=True)


@dataclass(frozen=True)
class Blocks:
    """Numbers of one byte, and for each block of them the float32 by which they are multiplied."""

    name: str
    dtype: torch.dtype
    largest: float  # what the largest number of a block is written as

    def nbytes(self, n: int) -> int:
        return n + _SCALE_BYTES * -(-n // BLOCK)

    def encode(self, x: Tensor) -> Tensor:
        parts = [self._encoded(part) for part in _blocks(x.reshape(-1).float())]
        return torch.cat([x.view(-1).view(torch.uint8) for x in (*_first(parts), *_second(parts))])

    def _encoded(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """(scales, numbers) of a matrix whose rows are blocks."""
        scale = block.abs().amax(1, keepdim=True) / self.largest
        scale = scale.masked_fill(~torch.isfinite(scale), torch.nan)
        # Beside a scale that is too small for a float32, or nearly, numbers may be too large.
        number = (block / scale.masked_fill(scale == 0, 1)).clamp_(-self.largest, self.largest)
        if not self.dtype.is_floating_point:
            number = number.round_().nan_to_num_()
        return scale, number.to(self.dtype)

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        scales, numbers = message.split([message.numel() - n, n])
        rows = zip(_blocks(numbers.view(self.dtype)), _rows(_as(scales, torch.float32), n))
        return torch.cat([(x.float() * scale).view(-1) for x, scale in rows]).to(dtype)


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
