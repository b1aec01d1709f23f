"""Old names of a transport's methods still work, and warn."""

from __future__ import annotations

import pytest
import torch

import mirrored
from tests.ranks import on_ranks

X = torch.arange(6.0).reshape(3, 2)


@on_ranks(3)
def test_an_old_name_warns_and_does_what_the_new_one_does(rank: int) -> None:
    t, ranks = mirrored.current(), (0, 1, 2)
    x, rows, columns = X + rank, [3] * 3, [1, 1, 0]
    for old, new, args in (
        ("join", "all_gather_into_tensor", (x, 0, rows, ranks)),
        ("join_several", "all_gather_several", ([x, x], [0, 0], [rows, rows], ranks)),
        ("start_join_several", "start_all_gather_several", ([x], [0], [rows], ranks)),
        ("turn", "all_to_all_single", (x, 1, columns, 0, rows, ranks)),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old} is now called {new};"):
            made = getattr(t, old)(*args)
        wanted = getattr(t, new)(*args)
        if hasattr(made, "wait"):
            made, wanted = made.wait(), wanted.wait()
        torch.testing.assert_close(made, wanted, rtol=0, atol=0)
