"""Imported, where tests use Inductor, by the process that ranks are forked from: Inductor itself,
and which vector instructions there are, for which it starts an interpreter. No rank repeats it.

Its kernels for ranks use no vectors: a compiler takes half the time. Those of the test's own
process do, as by default.
"""

from __future__ import annotations

import torch._inductor.compile_fx
import torch._inductor.config as config
import torch._inductor.fx_passes.joint_graph
import torch._inductor.lowering  # noqa: F401
from torch._inductor.cpu_vec_isa import pick_vec_isa

pick_vec_isa()
config.cpp.simdlen = 1
