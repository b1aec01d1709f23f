"""docs/faults.md shows every fault of tests/faults, with the line, op and boxing of each rank.

Who gives up first and after how many seconds differs from run to run, so the rest is not compared.
"""

from __future__ import annotations

import pytest

from tests.faults.places import places
from tests.faults.programs import FINE, INSTEAD, RANKS
from tests.faults.worlds import World
from tests.generated import DOCS, generator

FAULTS = [name for name in RANKS if name not in FINE]


MAKE = generator("make_faults")
PAGE = (DOCS / "faults.md").read_text()


def test_the_page_has_one_section_for_each_fault() -> None:
    found = [line for line in PAGE.splitlines() if line.startswith("## ")]
    assert found == [MAKE.heading(name) for name in FAULTS], "run python docs/make_faults.py"


@pytest.mark.parametrize("name", FAULTS)
def test_a_section_says_where_each_rank_is(name: str) -> None:
    section = PAGE.partition(f"{MAKE.heading(name)}\n")[2].partition("\n## ")[0].splitlines()
    for ranks, hosts in RANKS[name]:
        start = MAKE.ranks_of(World(name, ranks, hosts))
        (row,) = (line for line in section if line.startswith(start))
        said = row.split("<br>rank ")
        for rank, words in places(name, ranks).items():
            wanted = [MAKE.short(word) for word in words]
            assert any(each.startswith(f"{rank}: ") and has(each, wanted) for each in said), row
        assert all(word in row for rank, word in INSTEAD[name].items() if rank < ranks), row


def has(text: str, words: list[str]) -> bool:
    return all(word in text for word in words)
