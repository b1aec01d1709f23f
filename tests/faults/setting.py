"""What the programs of ranks that go astray start from, and how long a rank waits there."""

from __future__ import annotations

import os
import time

import torch

import consistent
import mirrored
from consistent import B, P, Placement, S

# Seconds that a rank waits: more where the machine does much else, so that no rank is late by that.
T = float(os.environ.get("FAULTS_T", 0)) or min(
    12.0, max(4.0, os.getloadavg()[0] / (os.cpu_count() or 1))
)
ASTRAY = 1.5 * T  # a rank that goes astray for so long has others give up


class Setting:
    """What the programs start from: tensors of all ranks, and a step that all can do."""

    def __init__(self, rank: int, n: int) -> None:
        self.rank, self.n, self.ranks = rank, n, tuple(range(n))
        placement = Placement("cpu", self.ranks)
        self.x = consistent.ones(6, 4, placement=placement, sbp=S(0))
        self.w = consistent.ones(4, 6, placement=placement, sbp=S(1)).requires_grad_()
        self.replicated = consistent.ones(4, 6, placement=placement, sbp=B).requires_grad_()
        self.partial = consistent.ones(3, placement=placement, sbp=P)
        self.plain = torch.ones(4, 2)
        self.step()
        mirrored.all_reduce(self.plain, self.ranks)
        time.sleep(0.3)  # a program has run for longer when something happens

    def loss(self) -> torch.Tensor:
        return (self.x.to_global(sbp=B) @ self.w).sum()

    def step(self) -> float:
        return self.loss().item()
