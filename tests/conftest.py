"""What all tests share: the pools of processes end with the session; GPU tests skip without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import close_pools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
