"""The world that placements are checked against, before a message has started torch.distributed."""

from __future__ import annotations

import pytest

from consistent import Placement


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun puts into the environment of a rank of three."""
    told = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("launched")
def test_a_placement_may_come_before_the_first_message() -> None:
    assert Placement.all("cpu").ranks.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="the world has 3 ranks"):
        Placement("cpu", [0, 3])


def test_without_a_launcher_it_is_this_process() -> None:
    assert Placement.all("cpu").ranks.tolist() == [0]
