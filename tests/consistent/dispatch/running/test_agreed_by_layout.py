"""However operands lie, all ranks raise what torch raises, also those with nothing of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from mirrored.transports.default import current
from tests.consistent.dispatch.running.raising import CASES, LOOK_UPS, Case, last
from tests.consistent.dispatch.running.test_agreed import raised
from tests.ranks import ALL, simulate
from tests.twins import assert_same

Refused = tuple[Case, tuple[torch.Tensor, ...], tuple]


def _refused() -> list[Refused]:
    """The whole tensors of each case with its own bad value, and with indices below and above, of
    which each layout has one in turn."""
    found = [(c, c.given(True), sbps) for c in CASES for sbps in _layouts(c.good)]
    for case in LOOK_UPS:
        index = case.good[case.at]
        for turn, value in enumerate((-1, -99, 99) if index.dtype is torch.int64 else ()):
            bad = last(index, value)
            given = tuple(bad if i == case.at else x for i, x in enumerate(case.good))
            some = list(_layouts(given))
            found += [(case, given, sbps) for sbps in (some if ALL else some[turn::3])]
    found += [(c, c.good, sbps) for c in _DIVIDED for sbps in _layouts(c.good)]
    return found


def _by_zero(name: str, run: Any) -> Case:
    return Case(name, run, (torch.ones(3, 2).long(),), torch.ones(3, 2).long(), 0, (S(0),))


_DIVIDED = (
    _by_zero("floor_divide", lambda x: x // 0),
    _by_zero("remainder", lambda x: x % 0),
    _by_zero("fmod", lambda x: torch.fmod(x, 0)),
    _by_zero("div", lambda x: torch.div(x, 0, rounding_mode="trunc")),
)


def _layouts(given: tuple[torch.Tensor, ...]) -> Iterator[tuple]:
    """Each operand split alone, along each of its dims; all layouts together if asked for."""
    each = [[B, *map(S, range(x.ndim))] for x in given]
    for sbps in itertools.product(*each):
        if ALL or sum(sbp is not B for sbp in sbps) == 1:
            yield sbps


def _found(rank: int) -> list[tuple]:
    """(case, layout, what comes of it here) of each."""
    placement, found = consistent.placement("cpu", range(current().size)), []
    for case, tensors, sbps in _refused():
        given = [consistent.distribute(x.clone(), placement, e) for x, e in zip(tensors, sbps)]
        found.append((case.name, sbps, _outcome(case, given)))
    return found


def _outcome(case: Case, given: Any) -> Any:
    """What a call raises, else what it gives, whole."""
    given, out = list(given), []
    error = raised(lambda: out.append(case.run(*given)))
    if error is not None:
        return error
    return [x.full() if isinstance(x, consistent.GlobalTensor) else x for x in out]


@pytest.mark.filterwarnings("ignore")
def test_all_ranks_raise_what_torch_raises_or_give_what_it_gives() -> None:
    """On seven ranks some have nothing of every dim that is split, and meet no value there."""
    wanted = [_outcome(case, [x.clone() for x in tensors]) for case, tensors, _ in _refused()]
    for ranks in (3, 7) if ALL else (7,):
        every = simulate(_found, ranks)
        for each, want in zip(zip(*every, strict=True), wanted, strict=True):
            name, sbps, mine = each[0]
            if isinstance(want, tuple):
                assert isinstance(mine, tuple) and mine[0] == want[0], (name, sbps, mine, want)
                assert all(other[2] == mine for other in each), each
            else:
                assert_same(mine, want, f"{name} {sbps}")
