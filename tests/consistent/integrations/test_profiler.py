"""Boxings among the profiler's events."""

from __future__ import annotations

import torch

import consistent
from consistent import B, Placement, S
from consistent.integrations.profiler import name_boxings
from consistent.spec.tracer import callbacks
from tests.ranks import on_ranks


@on_ranks(2)
def test_boxings_have_their_moves_and_bytes(rank: int) -> None:
    x = consistent.ones(4, 8, placement=Placement("cpu", [0, 1]), sbp=S(0))
    before = list(callbacks("on_boxing_begin"))
    with torch.profiler.profile() as profile, name_boxings():
        x.to_global(sbp=B)
    names = [event.name for event in profile.events()]
    assert names.count("boxing S(0) -all_gather(0)-> B, 64 bytes") == 1
    assert callbacks("on_boxing_begin") == before
