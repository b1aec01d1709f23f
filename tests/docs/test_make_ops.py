"""docs/ops.md says what is so: it is what its generator writes, and no row is for an op torch
does not know."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention, varlen

from consistent.rules import table
from tests.generated import DOCS, generator

MAKE = generator("make_ops")


@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_the_generator_writes() -> None:
    written = (DOCS / "ops.md").read_text()
    if f"torch {MAKE.version()} " not in written:
        pytest.skip(f"docs/ops.md is of another torch than {MAKE.version()}")
    assert written == MAKE.page(), "docs/ops.md is out of date: run python docs/make_ops.py"


@pytest.mark.filterwarnings("ignore")
def test_every_row_is_for_an_op_that_torch_knows() -> None:
    known = set(MAKE.collected()) | MAKE.aten_names()
    known |= {name.strip("_") for name in dir(torch.Tensor)} | {"getitem", "setitem"}
    modules = torch, torch._C._nn, torch.nn.functional, torch.linalg, torch.special
    for module in (*modules, varlen, flex_attention):
        known |= {name.rstrip("_") for name in dir(module)}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        known.add("_upsample_lanczos2d_aa")
    assert sorted(set(table.ROWS) - known) == []
