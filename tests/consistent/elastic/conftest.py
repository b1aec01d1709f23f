"""No test leaves processes behind, whichever of its launches failed first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.consistent.elastic.control import end_all


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    yield
    end_all()
