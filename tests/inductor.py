"""Imported, where tests use Inductor, by the process that ranks are forked from: Inductor itself,
which no rank imports again.

Its kernels for ranks use no vectors: a compiler takes half the time, and nobody asks it which
vector instructions there are, by a program for each of them. Graphs of such kernels are cached on
disk under a tag of their own. Those of the test's own process use vectors, as by default.
"""

from __future__ import annotations

import torch._inductor.compile_fx
import torch._inductor.fx_passes.joint_graph
import torch._inductor.lowering  # noqa: F401
import torch.compiler.config
from torch._inductor import cpu_vec_isa

cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
torch.compiler.config.cache_key_tag = "without vectors"
