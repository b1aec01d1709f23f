"""The torch that the tests run on: what tests expect follows from it where releases differ."""

from __future__ import annotations

import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
# Since then dims have no names, `_convolution` has a kernel for tensors of meta, float8 products
# have all of theirs for the CPU, `trace` of a tall matrix has the right gradient, and a wrong mode
# of embedding_bag does not write beside its memory.
IS_2_13 = RELEASE >= (2, 13)
