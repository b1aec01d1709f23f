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
        strategies = {"dp": self.zero} if self.data > 1 else {}
        if self.tensor > 1:
            strategies["tp"] = "tensor+sequence" if self.sequence else "tensor"
        return strategies

    @property
    def is_plain(self) -> bool:
        """True for only data or only tensor parallelism, one micro-batch, no recomputation."""
        is_simple = self.micro_batches == 1 and not self.recompute
        return is_simple and self.stages == 1 and 1 in (self.tensor, self.data)

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


def smallest_bytes(choice: StrategyChoice, costs: Sequence[Cost], machine: Machine) -> int:
    """Return the bytes that the fullest rank holds if stages are balanced by memory.

    It is used to say by how much a model does not fit.
    """
    step = _Step(choice, costs, machine)
    ends = best_ends(step.lasting_by_unit, choice.stages, lambda *_: True) or [len(costs)]
    pairs = zip([0, *ends], ends, strict=False)
    return max(step.nbytes(stage, a, b) for stage, (a, b) in enumerate(pairs))


class _Step:
    """Seconds and bytes of a step of ``choice``, for any division of the units into stages.

    ``costs`` are those of the units, in order.
    """

    def __init__(self, choice: StrategyChoice, costs: Sequence[Cost], machine: Machine) -> None:
        self.choice, self.costs, self.machine = choice, costs, machine
        self.group = tuple(range(0, choice.data * choice.tensor, choice.tensor))
        self._seconds_cache: dict[tuple[str, int], float] = {}
        is_zero3 = choice.zero == "zero3"
        gathers = (3 if choice.recompute else 2) if is_zero3 else 0
        self.seconds = [
            c.forward + c.backward + gathers * self._collective_seconds("all_gather", c.params)
            for c in costs
        ]
        self.lasting_by_unit = [float(self._lasting_bytes(c)) for c in costs]
        self._lasting_up_to = _prefix_sums(self.lasting_by_unit)
        self._activations_up_to = _prefix_sums([float(c.activation_bytes) for c in costs])
        self._trainable_up_to = _prefix_sums([float(c.trainable_bytes) for c in costs])
        self._max_extra_bytes = RangeMax(
            [c.extra_bytes + (c.params if is_zero3 else 0) for c in costs]
        )
        # The gradients of the last backward are held in addition to the accumulated ones.
        self._accumulates_gradients = choice.data > 1 and choice.micro_batches > 1

    def nbytes(self, stage: int, begin: int, end: int) -> int:
        """Return the peak bytes of a rank of ``stage`` if it has the units ``costs[begin:end]``."""
        # Under 1F1B a stage has as many micro-batches in flight as stages follow it, itself
        # included.
        in_flight = min(self.choice.micro_batches, self.choice.stages - stage)
        total_bytes = self._lasting_up_to[end] - self._lasting_up_to[begin]
        total_bytes += in_flight * (self._activations_up_to[end] - self._activations_up_to[begin])
        if self._accumulates_gradients:
            total_bytes += int(self._trainable_up_to[end] - self._trainable_up_to[begin])
        return int(total_bytes + self._max_extra_bytes.max_in(begin, end))

    def total(self, pairs: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of the whole step.

        ``pairs`` has for each stage its (first unit, unit after its last).
        """
        times = [sum(self.seconds[a:b]) for a, b in pairs]
        sends = sum(2 * self._send_seconds(self.costs[b - 1].result) for _, b in pairs[:-1])
        final_seconds = max(self._final_seconds(self.costs[a:b]) for a, b in pairs)
        if self.choice.stages > 1 or self.choice.micro_batches > 1:
            step, action_seconds = self.machine.schedule_host_seconds
            times = [t + 2 * action_seconds for t in times]
            final_seconds += step
        return sum(times) + (self.choice.micro_batches - 1) * max(times) + sends + final_seconds

    def _final_seconds(self, costs: Sequence[Cost]) -> float:
        """Return the seconds after the last micro-batch of a stage with these units.

        These are gradient reductions that backward does not hide, the optimizer step, and the
        all-gather of parameters under ZeRO.
        """
        zero = self.choice.zero
        name = "all_reduce" if zero in ("data", "zero1") else "all_to_all"
        collectives = [self._collective_seconds(name, c.trainable_bytes) for c in costs]
        reductions = sum(collectives)
        if self.machine.host_overlaps and name == "all_reduce":
            # An all-reduce runs during the backward of the units before; a reduce-scatter is waited
            # for.
            hidden = sum(c.backward for c in costs) - costs[-1].backward
            reductions = max(max(collectives, default=0.0), reductions - hidden)
        step = sum(c.step for c in costs)
        if zero != "data":  # a rank updates only its part of each parameter, in as many op calls
            step = max(step / self.choice.data, sum(c.host_seconds for c in costs))
        gathered_bytes = sum(c.trainable_bytes for c in costs) if zero in ("zero1", "zero2") else 0
        return reductions + step + self._collective_seconds("all_gather", gathered_bytes)

    def _lasting_bytes(self, cost: Cost) -> float:
        """Return the bytes of a unit that each rank holds between steps.

        These are parameters, gradients and optimizer state; those that ZeRO shards are divided by
        the number of data-parallel ranks.
        """
        choice, data = self.choice, self.choice.data
        params, grads, state = float(cost.params), float(cost.trainable_bytes), float(cost.state)
        if choice.zero != "data":
            state /= data
        if choice.zero in ("zero2", "zero3") and choice.micro_batches == 1:
            grads /= data  # several micro-batches add up whole gradients first
        if choice.zero == "zero3":
            params /= data
        return params + grads + state

    def _collective_seconds(self, name: str, nbytes: int) -> float:
        """Return the seconds of the collective ``name`` over the data-parallel ranks.

        ``nbytes`` is the size of the whole tensor; 0 seconds if there is one rank.
        """
        n = len(self.group)
        if n == 1 or not nbytes:
            return 0.0
        seconds = self._seconds_cache.get((name, nbytes))
        if seconds is None:
            sent_bytes = nbytes * (n - 1) // n * (2 if name == "all_reduce" else 1)
            seconds = self.machine.message_seconds(name, sent_bytes, self.group)
            seconds += self.machine.message_host_seconds("backward")
            self._seconds_cache[name, nbytes] = seconds
        return seconds

    def _send_seconds(self, nbytes: int) -> float:
        ends = (0, len(self.group) * self.choice.tensor)
        seconds = self.machine.message_seconds("send", nbytes, ends)
        # Python of the sender and of the receiver.
        return seconds + 2 * self.machine.message_host_seconds("forward")


def _prefix_sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


class RangeMax:
    """Sparse table that returns ``max(values[begin:end])`` for any range in constant time."""

    def __init__(self, values: Sequence[int]) -> None:
        self._rows = [list(values)]  # row k: the maximum of each 2**k adjacent values
        step = 1
        while 2 * step <= len(values):
            row = self._rows[-1]
            self._rows.append([max(a, b) for a, b in zip(row, row[step:], strict=False)])
            step *= 2

    def max_in(self, begin: int, end: int) -> int:
        """Return the maximum of ``values[begin:end]``, which must not be empty."""
        k = (end - begin).bit_length() - 1
        row = self._rows[k]
        # Two windows of 2**k values, which may overlap, cover the whole range.
        return max(row[begin], row[end - (1 << k)])
