"""Rules of matmuls, functions of whole matrices, and Fourier transforms."""

from . import fft, linalg, matmul

__all__ = ["fft", "linalg", "matmul"]
