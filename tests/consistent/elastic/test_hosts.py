"""Two hosts whose link is cut for a while, or for good: never do both go on by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import ALL

from .links import cut
from .test_elastic import check

pytestmark = pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 runs it: minutes")


@pytest.mark.parametrize("seconds", [1, 5, 30, None])
def test_a_link_that_is_cut(tmp_path: Path, seconds: int | None) -> None:
    with cut(tmp_path / "run", seconds) as found:
        if found is None:
            pytest.skip("network namespaces need root and iproute2")
        print(f"cut for {seconds} s: {found}")
        # Both sides write the log: a second group of survivors would repeat its steps.
        check(found.first, found.ranks)
        if found.ranks == 2:
            assert found.status == 1 and found.ends_s is not None, found.second.text
        if seconds == 1:
            assert found.ranks == 4 and found.status == 0, found.second.text
        if seconds in (30, None):
            assert found.ranks == 2
