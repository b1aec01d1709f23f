"""Estimate of the seconds of a step under a strategy, computed from the costs of its units.

```
seconds = one micro-batch in every stage            the first passes through all stages
        + (micro-batches - 1) x the slowest stage   1F1B: the later ones follow it closely
        + messages between stages
        + the reduction of gradients that backward does not hide, and the optimizer's step
```

A search ranks all strategies by these estimates, and then simulates whole steps of the best ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...pipeline.balance import best_ends
from ..machines import Machine
from .costs import Cost


@dataclass(frozen=True, order=True)
class StrategyChoice:
    """A strategy as numbers: degrees of parallelism, ZeRO stage, micro-batches and recomputation.

    Args:
        tensor, data, stages: degrees of tensor, data and pipeline parallelism; their product is the
            number of ranks.
        sequence: whether the tensor-parallel plan is "tensor+sequence".
        zero: "data", "zero1", "zero2" or "zero3", along the data-parallel axis.
        rows: rows of a micro-batch on each data-parallel rank.
        micro_batches: number of micro-batches that a rank runs in a step.
        recompute: whether forwards of units, such as repeated layers, run again in backward.
    """

    stages: int
    tensor: int
    data: int
    zero: str
    sequence: bool
    recompute: bool
    rows: int
    micro_batches: int

    @property
    def plan(self) -> dict[str, str]:
        """Axis name -> strategy name, for the axes that have more than one rank."""
        found = {"dp": self.zero} if self.data > 1 else {}
        if self.tensor > 1:
            found["tp"] = "tensor+sequence" if self.sequence else "tensor"
        return found

    @property
    def is_plain(self) -> bool:
        """True for data or tensor parallelism alone, whole batches, and no recomputation."""
        alone = self.micro_batches == 1 and not self.recompute
        return alone and self.stages == 1 and 1 in (self.tensor, self.data)

    def __str__(self) -> str:
        parts = [f"{name} x {n}" for name, n in self._axes() if n > 1] or ["one rank"]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches of {self.rows}")
        return ", ".join(parts + ["recompute"] * self.recompute)

    def _axes(self) -> list[tuple[str, int]]:
        tensor = "tensor+sequence" if self.sequence else "tensor"
        return [("stages", self.stages), (tensor, self.tensor), (self.zero, self.data)]


@dataclass(frozen=True)
class StrategyEstimate:
    """Estimated seconds of a step and memory of a rank, for one choice.

    Args:
        nbytes: the most bytes that a rank holds.
        ends: for each stage, the index of the unit after its last one.
    """

    choice: StrategyChoice
    seconds: float
    nbytes: int
    ends: tuple[int, ...]


def estimate(
    choice: StrategyChoice, costs: Sequence[Cost], machine: Machine, memory: float
) -> StrategyEstimate | None:
    """Return the estimate of a step of ``choice``; None if it does not fit in ``memory`` bytes.

    Units are distributed over stages so that the slowest stage is as fast as possible.

    Args:
        costs: costs of the units in order; the last one includes the loss.
    """
    step = _Step(choice, costs, machine)
    ends = best_ends(
        step.seconds, choice.stages, lambda stage, a, b: step.nbytes(stage, a, b) <= memory
    )
    if ends is None:
        return None
    pairs = list(zip([0, *ends], ends, strict=False))
    nbytes = max(step.nbytes(stage, a, b) for stage, (a, b) in enumerate(pairs))
    return StrategyEstimate(choice, step.total(pairs), nbytes, tuple(ends))


def smallest(choice: StrategyChoice, costs: Sequence[Cost], machine: Machine) -> int:
    """Return the bytes that the fullest rank holds if stages are balanced by memory.

    It is used to say by how much a model does not fit.
    """
    step = _Step(choice, costs, machine)
    ends = best_ends(step.lasting, choice.stages, lambda *_: True) or [len(costs)]
    pairs = zip([0, *ends], ends, strict=False)
    return max(step.nbytes(stage, a, b) for stage, (a, b) in enumerate(pairs))


class _Step:
    """Seconds and bytes of a step of ``choice``, for any division of the units into stages.

    ``costs`` are those of the units, in order.
    """

    def __init__(self, choice: StrategyChoice, costs: Sequence[Cost], machine: Machine) -> None:
        self.choice, self.costs, self.machine = choice, costs, machine
        self.group = tuple(range(0, choice.data * choice.tensor, choice.tensor))
        self._known: dict[tuple[str, int], float] = {}
        gathered = choice.zero == "zero3"
        gathers = (3 if choice.recompute else 2) if gathered else 0
        self.seconds = [
            c.forward + c.backward + gathers * self._shared("all_gather", c.params) for c in costs
        ]
        self.lasting = [float(self._lasting(c)) for c in costs]
        self._lasting_up_to = _sums(self.lasting)
        self._kept_up_to = _sums([float(c.kept) for c in costs])
        self._trained_up_to = _sums([float(c.trained) for c in costs])
        self._over = Highest([c.over + (c.params if gathered else 0) for c in costs])
        # The gradients of the last backward are held in addition to the accumulated ones.
        self._adds = choice.data > 1 and choice.micro_batches > 1

    def nbytes(self, stage: int, begin: int, end: int) -> int:
        """Return the peak bytes of a rank of ``stage`` if it has the units ``costs[begin:end]``."""
        # Under 1F1B a stage has as many micro-batches in flight as stages follow it, itself
        # included.
        flight = min(self.choice.micro_batches, self.choice.stages - stage)
        found = self._lasting_up_to[end] - self._lasting_up_to[begin]
        found += flight * (self._kept_up_to[end] - self._kept_up_to[begin])
        if self._adds:
            found += int(self._trained_up_to[end] - self._trained_up_to[begin])
        return int(found + self._over.of(begin, end))

    def total(self, pairs: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of the whole step.

        ``pairs`` has for each stage its (first unit, unit after its last).
        """
        times = [sum(self.seconds[a:b]) for a, b in pairs]
        sends = sum(2 * self._send(self.costs[b - 1].result) for _, b in pairs[:-1])
        last = max(self._last(self.costs[a:b]) for a, b in pairs)
        if self.choice.stages > 1 or self.choice.micro_batches > 1:
            step, each = self.machine.schedule_host_seconds
            times = [t + 2 * each for t in times]
            last += step
        return sum(times) + (self.choice.micro_batches - 1) * max(times) + sends + last

    def _last(self, costs: Sequence[Cost]) -> float:
        """Return the seconds after the last micro-batch of a stage with these units.

        These are gradient reductions that backward does not hide, the optimizer step, and the
        all-gather of parameters under ZeRO.
        """
        zero = self.choice.zero
        name = "all_reduce" if zero in ("data", "zero1") else "all_to_all"
        each = [self._shared(name, c.trained) for c in costs]
        reductions = sum(each)
        if self.machine.host_overlaps and name == "all_reduce":
            # An all-reduce runs during the backward of the units before; a reduce-scatter is waited
            # for.
            hidden = sum(c.backward for c in costs) - costs[-1].backward
            reductions = max(max(each, default=0.0), reductions - hidden)
        step = sum(c.step for c in costs)
        if zero != "data":  # a rank updates only its part of each parameter, in as many op calls
            step = max(step / self.choice.data, sum(c.issued for c in costs))
        after = sum(c.trained for c in costs) if zero in ("zero1", "zero2") else 0
        return reductions + step + self._shared("all_gather", after)

    def _lasting(self, cost: Cost) -> float:
        """Return the bytes of a unit that each rank holds between steps.

        These are parameters, gradients and optimizer state; those that ZeRO shards are divided by
        the number of data-parallel ranks.
        """
        choice, data = self.choice, self.choice.data
        params, grads, state = float(cost.params), float(cost.trained), float(cost.state)
        if choice.zero != "data":
            state /= data
        if choice.zero in ("zero2", "zero3") and choice.micro_batches == 1:
            grads /= data  # several micro-batches add up whole gradients first
        if choice.zero == "zero3":
            params /= data
        return params + grads + state

    def _shared(self, name: str, nbytes: int) -> float:
        """Return the seconds of the collective ``name`` over the data-parallel ranks.

        ``nbytes`` is the size of the whole tensor; 0 seconds if there is one rank.
        """
        n = len(self.group)
        if n == 1 or not nbytes:
            return 0.0
        found = self._known.get((name, nbytes))
        if found is None:
            sent = nbytes * (n - 1) // n * (2 if name == "all_reduce" else 1)
            found = self.machine.message_seconds(name, sent, self.group)
            found += self.machine.message_host_seconds("backward")
            self._known[name, nbytes] = found
        return found

    def _send(self, nbytes: int) -> float:
        ends = (0, len(self.group) * self.choice.tensor)
        seconds = self.machine.message_seconds("send", nbytes, ends)
        # Python of the sender and of the receiver.
        return seconds + 2 * self.machine.message_host_seconds("forward")


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


class Highest:
    """Sparse table that returns ``max(values[begin:end])`` for any range in constant time."""

    def __init__(self, values: Sequence[int]) -> None:
        self._rows = [list(values)]  # row k: the maximum of each 2**k adjacent values
        step = 1
        while 2 * step <= len(values):
            row = self._rows[-1]
            self._rows.append([max(a, b) for a, b in zip(row, row[step:], strict=False)])
            step *= 2

    def of(self, begin: int, end: int) -> int:
        """Return the maximum of ``values[begin:end]``, which must not be empty."""
        k = (end - begin).bit_length() - 1
        row = self._rows[k]
        # Two windows of 2**k values, which may overlap, cover the whole range.
        return max(row[begin], row[end - (1 << k)])
