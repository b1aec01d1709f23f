"""What all tests share: the pools of processes end with the session; GPU tests skip without one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

from mirrored.transports import table
from tests.ranks import close_pools

_CACHE = "XDG_CACHE_HOME"


def pytest_configure(config: pytest.Config) -> None:
    """All ranks take the ways that the built-in table says: one measured just now, beside whatever
    else the machine does, would have other tests test other code."""
    config.stash[_FOLDER] = os.environ[_CACHE] = tempfile.mkdtemp(prefix="consistent-tests-")
    for ranks in range(2, 9):
        table.save(table.Table(), ranks, table.processors())


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


_FOLDER = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a keyword is also the name of a folder
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
