"""Handwritten digits, from the original MNIST files or from scikit-learn's bundled ones."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FOLDER = "CONSISTENT_MNIST"
STEPS = "CONSISTENT_MNIST_STEPS"
SIDE = 28
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Digits(NamedTuple):
    """Handwritten digits: images and their labels, for training and for tests.

    Images are of shape [n, 1, 28, 28] and torch's default dtype, with values from 0 to 1. Labels
    are int64 of shape [n].
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(folder: str | None = None, seed: int = 0) -> Digits:
    """Load the MNIST files in ``folder``, or scikit-learn's 1,797 digits if it is None.

    80 % of scikit-learn's digits are for training, the rest is for tests. Every rank that loads
    with the same arguments gets the same tensors.

    Raises:
        FileNotFoundError: one of the four files is missing in ``folder``, plain and as ``.gz``.
        ValueError: the content of a file is not what its name says.
    """
    if folder is None:
        return _load_bundled(seed)
    images, labels, test_images, test_labels = (
        _read_idx_file(Path(folder), name) for name in _FILES
    )
    for part_images, part_labels in ((images, labels), (test_images, test_labels)):
        if len(part_images) != len(part_labels):
            raise ValueError(
                f"mnist: {folder} has {len(part_images)} images and {len(part_labels)} labels.\n"
                "  Each image needs its label.\n"
                "  Take all four files from the same source."
            )
    return Digits(
        _scale_images(images, 255),
        labels.long(),
        _scale_images(test_images, 255),
        test_labels.long(),
    )


Part = tuple["Batches", "Batches"]


def load_mnist(
    train_batch_size: int = 100, test_batch_size: int | None = None
) -> tuple[Part, Part]:
    """Return ((train images, train labels), (test images, test labels)), each as batches.

    Images are f32[n, 1, 28, 28] in 0..1 and labels i32[n], as numpy arrays. The data are read from
    the folder that the environment variable CONSISTENT_MNIST names. Without that variable they are
    scikit-learn's digits, which the training set repeats in different orders until it is as large
    as MNIST's training set.

    CONSISTENT_MNIST_STEPS=n ends iteration after n training batches, counted over all passes.
    """
    folder = os.environ.get(FOLDER)
    digits = load(folder)
    repeats = 1
    if folder is None:
        if os.environ.get("RANK", "0") == "0":
            print(
                f"load_mnist: {FOLDER} names no folder with MNIST, so these are scikit-learn's "
                f"1,797 digits, resampled to {SIDE} x {SIDE}.",
                file=sys.stderr,
            )
        repeats = 60_000 // len(digits.train_labels)
    limit = int(os.environ[STEPS]) if STEPS in os.environ else None
    test_size = test_batch_size or train_batch_size
    train = _batches(digits.train_images, digits.train_labels, train_batch_size, repeats, limit)
    return train, _batches(digits.test_images, digits.test_labels, test_size, 1, None)


def _batches(images: Tensor, labels: Tensor, size: int, repeats: int, limit: int | None) -> Part:
    rng, count = np.random.default_rng(0), len(labels)
    orders = [np.arange(count)]  # in the order of the files
    orders += [rng.permutation(count) for _ in range(repeats - 1)]
    order = np.concatenate(orders)
    return (
        Batches(images.to(torch.float32).numpy(), order, size, limit),
        Batches(labels.numpy().astype(np.int32), order, size, limit),
    )


class Batches(Sequence[np.ndarray]):
    """Sequence of batches of equal ``size``; an incomplete last batch is left out.

    Batch k is ``values[order[k * size : (k + 1) * size]]``. ``limit`` ends iteration after that
    many batches, counted over all passes; None sets no limit.
    """

    def __init__(self, values: np.ndarray, order: np.ndarray, size: int, limit: int | None):
        self._values, self._order, self._size, self._remaining = values, order, size, limit

    def __len__(self) -> int:
        return len(self._order) // self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        start = range(len(self))[index] * self._size
        return self._values[self._order[start : start + self._size]]

    def __iter__(self) -> Iterator[np.ndarray]:
        for k in range(len(self)):
            if self._remaining is not None:
                if self._remaining == 0:
                    return
                # Not reset: the limit holds over all passes.
                self._remaining -= 1
            yield self[k]


def _load_bundled(seed: int) -> Digits:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images = _scale_images(torch.from_numpy(digits.images), 16)
    labels = torch.from_numpy(digits.target).long()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    train_count = len(labels) * 4 // 5
    train, test = order[:train_count], order[train_count:]
    return Digits(images[train], labels[train], images[test], labels[test])


def _scale_images(images: Tensor, largest: int) -> Tensor:
    """Convert images [n, height, width] with values up to ``largest`` to [n, 1, 28, 28] in 0..1.

    Images of another size than 28 x 28 are interpolated.
    """
    x = images.to(torch.get_default_dtype()).unsqueeze(1) / largest
    if x.shape[-2:] == (SIDE, SIDE):
        return x
    return F.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False)


def _read_idx_file(folder: Path, name: str) -> Tensor:
    """Read a file in MNIST's idx format from ``folder``, plain or as ``.gz``.

    The file begins with the bytes 0, 0, 8 (the data are unsigned bytes) and the number of dims.
    The size of each dim follows as a big-endian int32, and then the data.
    """
    dims = 3 if "idx3" in name else 1
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"mnist: {folder} has neither {name} nor {name}.gz.\n"
            "  MNIST is four idx files, two of images and two of labels.\n"
            f"  Put {', '.join(_FILES)} there, or name no folder to use scikit-learn's digits."
        )
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt_error(path, f"cannot be read: {error}") from None
    head = bytes((0, 0, 8, dims))
    if data[:4] != head or len(data) < 4 + 4 * dims:
        raise _corrupt_error(path, f"starts with {data[:4].hex() or 'nothing'}, not {head.hex()}")
    shape = [int(n) for n in np.frombuffer(data, ">i4", dims, 4)]
    start = 4 + 4 * dims
    if len(data) - start != np.prod(shape, dtype=np.int64):
        raise _corrupt_error(
            path, f"holds {len(data) - start} bytes of data, and its head says {shape}"
        )
    # A bytearray, because torch warns about a tensor on the read-only memory of ``bytes``.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)


def _corrupt_error(path: Path, why: str) -> ValueError:
    return ValueError(
        f"mnist: {path} {why}.\n"
        "  An idx file is a head with its sizes, then that many bytes: this one was cut short,\n"
        "  or is another file.\n"
        "  Fetch it again, or name no folder to use scikit-learn's digits."
    )
