"""Islands in plain torch, in one process: what their losses and parameters have to be.

``replay`` follows a given schedule of meetings, so that it also follows one in which islands come
late, are lost, or are started again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .program import STEPS, batches, model, outer_of

Meeting = tuple[int, int]  # part, number


@dataclass
class Run:
    """One life of an island: which meetings it attended in which step.

    Attributes:
        island: its number.
        met: after each step, and after the end if it came to it, the number of the last meeting of
            each part that the island attended.
        ended: whether it came to the end, so that the last element of ``met`` is no step.
        is_new: whether the others had met before it was started.
    """

    island: int
    met: list[list[int]]
    ended: bool = False
    is_new: bool = False
    losses: list[float] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)


class _Life:
    """The model and optimizer of a run, which stops at each meeting until the others have come."""

    def __init__(self, run: Run, given: dict[str, Any], parts: int) -> None:
        self.run, self.net = run, model()
        self.params = list(self.net.parameters())
        self.inner = getattr(torch.optim, given["inner"])(self.params, lr=given.get("lr", 0.1))
        self.starts = [p.detach().clone() for p in self.params]
        self.is_new = [run.is_new] * parts
        self.ends = False  # whether the next meeting is the one at its end
        self.meets = self._meetings(parts)
        self.at = next(self.meets, None)

    def _meetings(self, parts: int) -> Iterator[Meeting]:
        last, data = [0] * parts, batches(self.run.island, len(self.run.met))
        for step, ((x, y), met) in enumerate(zip(data, self.run.met, strict=True), 1):
            self.ends = self.run.ended and step == len(self.run.met)
            if not self.ends:
                self.inner.zero_grad()
                loss = F.cross_entropy(self.net(x), y)
                loss.backward()
                self.inner.step()
                self.run.losses.append(loss.item())
            yield from ((k, met[k]) for k in range(parts) if met[k] != last[k])
            last = met
        self.run.values = [p.flatten().tolist() for p in self.params]


@torch.no_grad()
def _meet(lives: list[_Life], part: int, mine: list[int], outer: Any, starts: Any) -> None:
    """Hold one meeting of ``lives`` over the parameters ``mine`` of the part."""
    old = [life for life in lives if not life.is_new[part]]
    ends = any(life.ends for life in lives)
    for i in mine:
        gaps = [life.starts[i] - life.params[i] for life in old]
        starts[i].grad = sum(gaps, torch.zeros_like(starts[i])) / max(1, len(old))
        if ends:
            starts[i] -= starts[i].grad
    if not ends:
        outer.step()
    outer.zero_grad()
    for life in lives:
        life.is_new[part] = False
        for i in mine:
            life.params[i].copy_(starts[i])
            life.starts[i].copy_(starts[i])


def replay(given: dict[str, Any], runs: list[Run]) -> list[Run]:
    """Fill in the losses and values of ``runs``, from the meetings that they attended."""
    parts = given.get("parts", 1)
    starts = [nn.Parameter(p.detach().clone()) for p in model().parameters()]
    total, seen, part_of = sum(p.numel() for p in starts), 0, []
    for p in starts:
        part_of.append(min(parts - 1, seen * parts // total))
        seen += p.numel()
    outer = outer_of(given)(starts)
    with torch.enable_grad():
        lives = [_Life(run, given, parts) for run in runs]
        while waiting := [life for life in lives if life.at is not None]:
            # A meeting is ready if every run that attends it has come to it.
            part, number = next(
                life.at
                for life in waiting
                if life.at and all(o.at == life.at for o in lives if _attends(o.run, life.at))
            )
            here = [life for life in waiting if life.at == (part, number)]
            _meet(here, part, [i for i, k in enumerate(part_of) if k == part], outer, starts)
            for life in here:
                life.at = next(life.meets, None)
    return runs


def _attends(run: Run, meeting: Meeting) -> bool:
    return any(met[meeting[0]] == meeting[1] for met in run.met)


def alone(given: dict[str, Any]) -> dict[str, Any]:
    """Losses and values, by island, if no island comes late."""
    every, parts = given["every"], given.get("parts", 1)
    # Part k of n meets at step every * k / n of each interval.
    due = [[s % every == every * k // parts % every for s in range(1, STEPS + 1)]
           for k in range(1, parts + 1)]  # fmt: skip
    met = [[sum(each[:step]) for each in due] for step in range(1, STEPS + 1)]
    found = replay(given, [Run(k, met) for k in range(given["islands"])])
    return {"losses": [r.losses for r in found], "values": [r.values for r in found]}
