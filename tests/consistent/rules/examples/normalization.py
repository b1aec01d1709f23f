"""Calls that prove the rows of consistent/rules/norm.py."""

from __future__ import annotations

import torch

from tests.brute_force import example, fixed
from tests.consistent.rules.examples.numbers import real, unit

EXAMPLES = (
    *(
        example(torch.batch_norm, x, w, b, m, v, training, 0.3, 1e-3, False)
        for x, training in (
            (real(5, 7), True),
            (real(4, 5, 3, 2), True),
            (real(4, 5, 3, 2), False),
            (real(5, 7), False),
        )
        for w, b in ((real(x.shape[1]), real(x.shape[1])), (None, None))
        for m, v in ((fixed(real(x.shape[1])), fixed(unit(x.shape[1]))),)
    ),
    example(torch.batch_norm, real(5, 4, 3), None, None, None, None, True, 0.1, 1e-5, True),
    example(torch.batch_norm, real(5, 4, 3), None, real(4), None, None, True, 0.1, 1e-5, True),
    example(torch.group_norm, real(5, 6, 3), 2, real(6), real(6)),
    example(torch.group_norm, real(5, 6, 3, 2), 3, real(6), real(6), 1e-3),
    example(torch.group_norm, real(2, 8), 4),
    example(torch.group_norm, real(2, 24, 3), 12, real(24), real(24)),
    example(torch.group_norm, real(2, 5, 7), 1, real(5)),
    example(torch.group_norm, real(2, 5, 7), 5, real(5), real(5)),
    example(
        torch.instance_norm, real(4, 5, 7), real(5), real(5), None, None, True, 0.1, 1e-5, False
    ),
    example(torch.instance_norm, real(2, 5, 3, 4), None, None, None, None, True, 0.1, 1e-3, False),
    example(
        torch.instance_norm,
        real(4, 5, 7),
        real(5),
        real(5),
        fixed(real(5)),
        fixed(unit(5)),
        True,
        0.1,
        1e-5,
        False,
    ),
    example(
        torch.instance_norm,
        real(4, 5, 7),
        real(5),
        real(5),
        fixed(real(5)),
        fixed(unit(5)),
        False,
        0.1,
        1e-5,
        False,
    ),
    example(torch.layer_norm, real(5, 7), (7,), real(7), real(7)),
    example(torch.layer_norm, real(4, 5, 7), (5, 7), real(5, 7), real(5, 7), 1e-3),
    example(torch.layer_norm, real(4, 5, 7), [7], None, real(7)),
    example(torch.layer_norm, real(4, 5, 7), [7], real(7)),
    example(torch.layer_norm, real(5, 2), (2,)),
    example(torch.layer_norm, real(7), (7,), weight=real(7), bias=real(7)),
    example(torch.nn.functional.layer_norm, real(5, 7), (7,), real(7), real(7)),
    example(torch.native_layer_norm, real(4, 5, 7), (7,), real(7), real(7), 1e-5),
    example(torch.native_layer_norm, real(4, 5, 7), (5, 7), real(5, 7), real(5, 7), 1e-5),
    example(torch.rms_norm, real(4, 5, 7), (7,), real(7)),
    example(torch.rms_norm, real(5, 7), (5, 7), None, 1e-3),
    example(torch.nn.functional.rms_norm, real(5, 7), (7,), real(7), 1e-3),
)
