"""A fixture for pytest: ``pytest_plugins = ["consistent.verification.fixtures"]`` in conftest.py.

```
def test_my_step(verify):
    verify(step, plans=["data", "zero3"])
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .verify import Verified
from .verify import verify as run


@pytest.fixture
def verify() -> Callable[..., Verified]:
    """Return ``consistent.verify`` wrapped so that it fails the test if a tensor differs."""

    def run_checked(*args: Any, **kwargs: Any) -> Verified:
        result = run(*args, **kwargs)
        result.check()
        return result

    return run_checked
