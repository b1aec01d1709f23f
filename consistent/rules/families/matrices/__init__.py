"""Products, functions of whole matrices, Fourier transforms."""

from . import fft, linalg, matmul

__all__ = ["fft", "linalg", "matmul"]
