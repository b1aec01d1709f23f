"""What all tests share: pools of processes end with the session; GPU tests skip without a GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mirrored.transports.tuning import table
from tests.ranks import close_pools

_CACHE = "XDG_CACHE_HOME"


def pytest_configure(config: pytest.Config) -> None:
    """Make all ranks use the built-in table. One measured now, beside other load on the machine,
    could send moves another way, so that tests would test other code."""
    config.stash[_FOLDER] = os.environ[_CACHE] = tempfile.mkdtemp(prefix="consistent-tests-")
    for ranks in range(2, 9):
        table.save(table.Table(), ranks, table.processors())


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


_FOLDER = pytest.StashKey[str]()


# The longest files, each of some half a minute of processor time or more. Paths below tests/.
LONGEST = (
    "consistent/rules/test_rows.py", "consistent/compiled/test_bounded.py", "docs/test_pages.py",
    "csrc/test_builds.py", "csrc/test_emulated.py", "examples/test_train_gpt.py",
    "consistent/nn/test_sharded_step.py",
    "consistent/pipeline/test_pipeline.py", "faults/test_faults.py",
    "examples/test_seed_programs.py", "consistent/rules/families/indexing/test_masks.py",
    "consistent/compiled/test_overlap.py", "consistent/programs/test_placements.py",
    "consistent/torch_patches/test_plain_programs.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First, so that no worker is alone with a long file in the end.
    longest = {Path(__file__).parent / name for name in LONGEST}
    items.sort(key=lambda item: item.path not in longest)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not a keyword: those include the names of folders
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
