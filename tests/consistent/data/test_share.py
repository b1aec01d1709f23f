"""Share: the items of a batch that a rank reads are those that it holds."""

from __future__ import annotations

import itertools

import pytest
import torch

from consistent import B, Placement, S
from consistent.data.share import Share
from consistent.spec import TensorSpec

GRID = Placement("cpu", [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("sbp", list(itertools.product((S(0), S(1), B), repeat=2)), ids=str)
def test_a_share_is_what_the_spec_says(sbp) -> None:
    for count in (0, 1, 5, 12, 13):
        spec = TensorSpec.of(GRID, sbp, (count, 4), torch.float32)
        for at in itertools.product(range(2), range(3)):
            starts, sizes = spec.region(at)
            assert Share.for_coordinate(at, GRID, sbp).start_and_size(count) == (
                starts[0],
                sizes[0],
            )


def test_ranks_that_read_the_same_have_the_same_index() -> None:
    shares = {
        at: Share.for_coordinate(at, GRID, (B, S(0)))
        for at in itertools.product(range(2), range(3))
    }
    assert [share.index for share in shares.values()] == [0, 1, 2, 0, 1, 2]


def test_an_empty_share_reads_one_item_that_does_not_count() -> None:
    assert Share(((3, 2),)).select(["a", "b"]) == (["a"], 0)
    assert Share(((3, 1),)).select(["a", "b"]) == (["b"], 1)
