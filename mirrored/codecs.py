"""Codecs that encode the floats of a message in fewer bytes, and decode them.

```
"bf16"   2 bytes a number    rounded to bfloat16
"int8"   1 byte a number     and a float32 scale for each block of 256: number = scale * integer
"fp8"    1 byte a number     the same, with float8_e4m3fn for the integer
```

A message of n numbers in blocks has ``4 * ceil(n / 256) + n`` bytes: first all scales, then the
numbers. The decoded values depend on the bytes alone, so ranks that read the same bytes get the
same bits. If a block contains a NaN, an infinity or a number too large for float32, the whole block
is decoded as NaN, so that an overflow is never mistaken for finite values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from .reduction import accumulation_dtype, ordered_reduce
from .transports import _C  # noqa: F401  # pyright: ignore # it registers torch.ops.mirrored

BLOCK = 256
_SCALE_BYTES = 4


class Codec(Protocol):
    """Interface of an encoder of floats into bytes and its decoder.

    A transfer that sends ``codec.write(x)`` in place of ``x`` sends fewer bytes, and loses
    precision.
    """

    @property
    def name(self) -> str:
        """Key of this codec in ``CODECS``, by which a parallelization plan selects it."""
        ...

    def nbytes(self, n: int) -> int:
        """Return the length in bytes of the message that encodes ``n`` numbers."""
        ...

    def write(self, x: Tensor, unsent: Tensor | None = None) -> Tensor:
        """Encode the numbers of ``x``, in order, as a 1-d uint8 tensor.

        The result has ``nbytes(x.numel())`` elements.

        Args:
            x: the numbers to send.
            unsent: for error feedback, the rounding errors of the messages before this one, in x's
                shape and in the dtype ``accumulation_dtype(x.dtype)`` (float32 for bfloat16). The
                method encodes ``x + unsent``, and overwrites ``unsent`` with the new rounding
                error. A rounding error that is not finite is stored as 0, since it would spoil all
                later messages.
        """
        ...

    def read(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        """Decode ``messages`` of ``n`` numbers each, and return their elementwise sum.

        The result is a 1-d tensor of ``n`` numbers of ``dtype``. The first message is added first.
        """
        ...


@dataclass(frozen=True)
class Rounded:
    """Codec that casts each element to a lower-precision float."""

    name: str
    dtype: torch.dtype

    def nbytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def write(self, x: Tensor, unsent: Tensor | None = None) -> Tensor:
        total = _add_unsent(x, unsent)
        if total.is_complex() and not self.dtype.is_complex:
            # A cast would drop the imaginary parts, with a warning at most.
            raise ValueError(f"{self.name}: x is {x.dtype}. Give torch.view_as_real(x).")
        rounded = total.to(self.dtype)
        if unsent is not None:
            store_rounding_error(unsent, total, rounded)
        return rounded.reshape(-1).view(torch.uint8)

    def read(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        return _sum_as_dtype([_view_as(message, self.dtype) for message in messages], dtype)


@dataclass(frozen=True)
class Blocks:
    """Codec that stores one byte for each element and one float32 scale for each block.

    Encoding and decoding are one pass of native code each, csrc/peer/blocks_cpu.cpp and blocks.cu.
    Torch ops with the same bits replace them for GPU tensors if the build has no CUDA kernels.
    """

    name: str
    dtype: torch.dtype
    largest: float  # stored value of the element of largest magnitude in a block

    def nbytes(self, n: int) -> int:
        return n + _SCALE_BYTES * -(-n // BLOCK)

    def write(self, x: Tensor, unsent: Tensor | None = None) -> Tensor:
        if not _has_native_op(x):
            return self._write_by_ops(x, unsent)
        message, rounding_error = torch.ops.mirrored.write_blocks(x, unsent, self.name)
        if unsent is not None:
            unsent.copy_(rounding_error)
        return message

    def read(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        if not _has_native_op(messages[0]):
            return self._read_by_ops(messages, n, dtype)
        return torch.ops.mirrored.read_blocks(messages, n, dtype, self.name)

    def _write_by_ops(self, x: Tensor, unsent: Tensor | None) -> Tensor:
        total = _add_unsent(x, unsent)
        encoded = [self._encode_blocks(part) for part in _block_matrices(total.reshape(-1).float())]
        message = torch.cat(
            [x.view(-1).view(torch.uint8) for x in (*_scales_of(encoded), *_numbers_of(encoded))]
        )
        if unsent is not None:
            store_rounding_error(
                unsent, total, self._decode_message(message, total.numel()).view(total.shape)
            )
        return message

    def _read_by_ops(self, messages: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
        return _sum_as_dtype([self._decode_message(message, n) for message in messages], dtype)

    def _encode_blocks(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a float32 matrix with one block in each row; return (scales, numbers).

        Scales are a column vector with one float32 for each row, numbers a matrix of this codec's
        dtype. Decoded, row k is ``numbers[k] * scales[k]``.
        """
        scale = block.abs().amax(1, keepdim=True) / self.largest
        # A NaN scale makes the whole block decode as NaN.
        scale = scale.masked_fill(~torch.isfinite(scale), torch.nan)
        # A block of zeros is divided by 1. A subnormal scale is rounded so coarsely that quotients
        # may exceed `largest`: hence the clamp.
        number = (block / scale.masked_fill(scale == 0, 1)).clamp_(-self.largest, self.largest)
        number = number.masked_fill_(scale.isnan(), 0)
        return scale, (number if self.dtype.is_floating_point else number.round_()).to(self.dtype)

    def _decode_message(self, message: Tensor, n: int) -> Tensor:
        """Decode a message of ``n`` numbers into a 1-d float32 tensor."""
        scales, numbers = message.split([message.numel() - n, n])
        rows = zip(
            _block_matrices(numbers.view(self.dtype)),
            _scale_columns(_view_as(scales, torch.float32), n),
        )
        return torch.cat([(x.float() * scale).view(-1) for x, scale in rows])


@cache
def _has_cuda_kernels() -> bool:
    # False in a build without CUDA.
    return torch._C._dispatch_has_kernel_for_dispatch_key("mirrored::write_blocks", "CUDA")


def _has_native_op(x: Tensor) -> bool:
    return not x.is_cuda or _has_cuda_kernels()


def _sum_as_dtype(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    wide = [part.to(accumulation_dtype(dtype)) for part in parts]
    return ordered_reduce(wide).to(dtype)


def _add_unsent(x: Tensor, unsent: Tensor | None) -> Tensor:
    return x if unsent is None else x + unsent  # in the dtype of `unsent`, which is the wider one


def store_rounding_error(unsent: Tensor, total: Tensor, decoded: Tensor) -> None:
    """Store the rounding error ``total - decoded`` in ``unsent``, to be added to the next message.

    ``total`` was to be sent, and ``decoded`` is what receivers decode from the message. Errors that
    are not finite are stored as 0.
    """
    unsent.copy_((total - decoded.to(total.dtype)).nan_to_num_(0.0, 0.0, 0.0))


def _block_matrices(flat: Tensor) -> list[Tensor]:
    """Cut ``flat`` into a matrix whose rows are full blocks, and a one-row matrix of the rest.

    For example 600 numbers give matrices of shapes (2, 256) and (1, 88). An empty matrix is left
    out, unless both are empty.
    """
    whole = flat.numel() // BLOCK * BLOCK
    parts = [flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)]
    return [part for part in parts if part.numel()] or [flat.view(0, BLOCK)]


def _scale_columns(scales: Tensor, n: int) -> Sequence[Tensor]:
    """Cut ``scales`` into column vectors, one for each matrix that ``_block_matrices`` returns.

    ``n`` is how many numbers were encoded. For 600 numbers the results have shapes (2, 1) and
    (1, 1), so that each scale multiplies the row that is its block.
    """
    whole = n // BLOCK
    parts = [scales[:whole].view(-1, 1), scales[whole:].view(-1, 1)]
    return [part for part in parts if part.numel()] or [scales.view(0, 1)]


def _scales_of(encoded: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [scale for scale, _ in encoded]


def _numbers_of(encoded: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [number for _, number in encoded]


def _view_as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes of ``message`` as ``dtype``, after a copy if they are not aligned."""
    aligned = message.storage_offset() % dtype.itemsize == 0
    return (message if aligned else message.clone()).view(dtype)


CODECS: dict[str, Rounded | Blocks] = {
    "bf16": Rounded("bf16", torch.bfloat16),
    "int8": Blocks("int8", torch.int8, 127.0),
    "fp8": Blocks("fp8", torch.float8_e4m3fn, 448.0),
}
"""Codecs by the name that a plan uses."""


def codec_of_dtype(dtype: torch.dtype) -> Rounded | Blocks:
    """Return the codec that encodes numbers as ``dtype``.

    It is the codec in ``CODECS`` that has this dtype, else one that only casts.
    """
    matches = [codec for codec in CODECS.values() if codec.dtype == dtype]
    return matches[0] if matches else Rounded(str(dtype), dtype)
