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


# What `make test-fast` leaves out: programs that start processes of their own, and proofs that go
# over all examples, layouts or faults. Paths below tests/.
SLOW = (
    "benchmarks", "consistent/autograd", "consistent/boxing/test_exchange.py", "consistent/data",
    "consistent/integrations",
    "consistent/dispatch/planning", "consistent/dispatch/running",
    "consistent/dispatch/test_hook.py", "consistent/flow", "consistent/forms/random",
    "consistent/forms/native", "consistent/movement", "consistent/nn", "consistent/overlap",
    "consistent/programs", "consistent/rules/families", "consistent/rules/test_addends.py",
    "consistent/rules/test_halves.py", "consistent/rules/test_rows.py",
    "consistent/tensor/inspection", "consistent/torch_patches", "csrc",
    "consistent/tensor/making/test_types.py", "docs/test_comparison.py",
    "docs/test_make_faults.py", "docs/test_pages.py", "examples", "faults", "gpu", "mirrored",
    "models",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    slow = {root / name for name in SLOW}
    files = {item.path for item in items}
    marked = {path for path in files if not slow.isdisjoint({path, *path.parents})}
    for item in items:
        if item.path in marked:
            item.add_marker(pytest.mark.slow)
    # First, so that no worker is alone with a long file in the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not a keyword: those include the names of folders
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
