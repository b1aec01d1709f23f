"""Calls that prove the rows of consistent/rules/{bags,ctc}.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.indexing import places
from tests.consistent.rules.examples.numbers import real, unit, whole

_OFFSETS = torch.tensor([0, 3, 3, 7])  # the second bag is empty
_ENDS = torch.tensor([0, 3, 3, 7, 9])
_ROWS, _JOINED = whole(5, 4, low=1, high=6), whole(9, low=1, high=6)
_INS, _OUTS = [7, 6, 7, 5, 7], [3, 1, 0, 2, 3]
_LOGS = real(7, 5, 6).log_softmax(-1)

_bag = torch.embedding_bag

_BAGS = (
    *(example(_bag, real(7, 5), places(7, 9), _OFFSETS, False, m) for m in (0, 1, 2)),
    example(_bag, real(7, 2), places(7, 9), _ENDS, False, 1, False, None, True, 2),
    example(_bag, real(2, 4), places(2, 9), _OFFSETS, False, 0, False, unit(9), False, -1),
    example(_bag, real(7, 5), places(7, 9), _OFFSETS, True, 0),
)  # fmt: skip

_CTC = (
    *(example(torch.ctc_loss, _LOGS, _ROWS, _INS, _OUTS, 0, r) for r in (0, 1, 2)),
    example(torch.ctc_loss, _LOGS, _JOINED, torch.tensor(_INS), torch.tensor(_OUTS), 0, 1, True),
    example(torch.ctc_loss, _LOGS[:, :2], _ROWS[:2], _INS[:2], _OUTS[:2], 0, 0),
)

EXAMPLES = (*_BAGS, *_CTC)
