"""``search``: find the fastest parallel strategy for a model on a number of ranks of a machine."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...pipeline.cut import Unit
from ...pipeline.micro_batches import narrow_batch, rows_of
from ...spec.nested import arguments_of, map_tensors
from ..machines import Machine
from ..machines.find import machine as machine_of
from ..pictures import CostsPicture
from ..simulation.report import SimulatedStep
from ..simulation.simulate import simulate
from .costs import Cost, CostSimulator, Optimizer
from .estimates import StrategyChoice, StrategyEstimate, estimate, smallest_bytes
from .strategy import Strategy, strategy_for
from .units import RecordedCalls, imagined_copy, record_calls, units_of

_MAX_ROWS = 8  # the most rows of a micro-batch
_MAX_WHOLE_ROWS = 64  # but a rank's batch of up to this many rows may be one micro-batch
_MAX_SIZES = 4  # the most micro-batch sizes that are tried for one choice of axes
_MAX_RANKS = 1 << 20
_MAX_SLOWDOWN = (
    1.5  # plain choices estimated this many times slower than the best are not preferred
)
_MAX_SIMULATED = 24  # whole steps that are simulated where none fits the memory


@dataclass(frozen=True)
class Tried:
    """A strategy that the search tried, with its seconds and memory.

    Args:
        choice: the strategy, as numbers.
        seconds: seconds of a step.
        nbytes: the most bytes that a rank holds.
        report: the simulated step; None if the numbers are only estimates.
    """

    choice: StrategyChoice
    seconds: float
    nbytes: int
    report: SimulatedStep | None = None

    def __str__(self) -> str:
        how = "estimated" if self.report is None else "simulated"
        return f"{self.seconds:10.4g} s {self.nbytes / 1e9:8.3g} GB  {how}  {self.choice}"


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Args:
        best: the fastest strategy.
        tried: all strategies that fit the memory, the fastest first; those whose whole step was
            simulated come before those that were only estimated.
        count: number of strategies that were considered.
    """

    best: Strategy
    tried: tuple[Tried, ...]
    count: int
    machine: Machine

    def picture(self) -> CostsPicture:
        """Return a bar chart of the tried strategies; its ``save`` writes SVG or PNG."""
        return CostsPicture(f"{self.best.ranks} ranks of {self.machine.name}", self.tried)

    def __str__(self) -> str:
        head = (
            f"{self.best.ranks} ranks of {self.machine.name}: {self.best}\n"
            f"  of {self.count} choices {len(self.tried)} fit the memory of a rank"
        )
        return "\n".join([head, *map(str, self.tried[:10])])


def search(
    model: nn.Module,
    ranks: int,
    example: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    machine: str | Machine = "this",
    memory: float | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
    bound: float | None = None,
    simulated: int = 4,
) -> Found:
    """Find the strategy that trains ``model`` fastest on ``ranks`` ranks.

    A strategy has stages, micro-batches, data and tensor parallelism, ZeRO and activation
    checkpointing.

    ```
    with torch.device("meta"):
        model = GPT(config)
    found = consistent.search(
        model, 64, tokens, loss=loss_of, target=tokens, machine="a100-8",
    )
    print(found)                            # what it chose, and the runners-up
    found.best.save("strategy.yaml")
    ```

    The search runs in one process, before the job: nothing is computed or sent. The parts of the
    model are simulated, each kind of part once for each tensor-parallel size and each size of
    micro-batch. Choices are ranked by sums of these simulated costs, and the best choices are
    simulated as whole steps. The same arguments find the same strategy.

    Args:
        model: the module as it was built, on ``meta`` if it is large. It is not changed.
        ranks: number of ranks of the job.
        example: a whole batch, of which only sizes matter: a tensor, a tuple of arguments, or a
            mapping of keywords.
        loss: loss function of (result, target), as passed to ``consistent.nn.pipeline``.
        target: the target, as passed to the ``step`` of a pipeline.
        machine: a name, a file or a ``Machine``, as passed to ``simulate``.
        memory: bytes that a rank may hold; without it the memory of the machine's devices.
        optimizer: function that makes an optimizer from parameters, such as
            ``functools.partial(torch.optim.AdamW, fused=True)``.
        bound: assumed share of elements that an op such as ``nonzero`` keeps; see ``simulate``.
        simulated: how many of the best choices are simulated as whole steps.

    Raises:
        ValueError: nothing fits in the memory; the message says by how much, and how many ranks
            would do.
        RuntimeError: a process group is in use in this process.
    """
    run = _Search(
        model, ranks, example, loss, target, machine_of(machine), memory, optimizer, bound
    )
    return run.best_of_choices(simulated)


class _Search:
    """One search, with the costs that it has simulated so far.

    The arguments are those of ``search``.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        example: Any,
        loss: Callable[[Any, Any], Any] | None,
        target: Any,
        machine: Machine,
        memory: float | None,
        optimizer: Optimizer,
        bound: float | None,
    ) -> None:
        _check(model, ranks, memory)
        machine = machine.of(ranks)
        self.model, self.ranks, self.machine = model, ranks, machine
        self.loss, self.optimizer, self.bound = loss, optimizer, bound
        self.memory = machine.memory_bytes if memory is None else memory
        args, kwargs = arguments_of(example)
        self.batch = args, kwargs, target
        self.rows = rows_of("search", self.batch)
        self.units: list[Unit] = units_of(model, min(ranks, self.rows, 1024))
        self.numel = sum(p.numel() * p.element_size() for p in model.parameters())
        self._followed: dict[int, RecordedCalls] = {}
        # (tensor, sequence, rows) -> cost of each unit
        self._costs: dict[tuple[int, bool, int], list[Cost]] = {}
        self._recomputed_costs: dict[tuple[int, bool, int], list[Cost]] = {}

    def best_of_choices(self, simulated: int) -> Found:
        """Return the best strategy, and the other choices that were tried."""
        choices = list(self._choices(self.ranks))
        self._simulate_units(choices)
        estimates = [(choice, self._estimate(choice)) for choice in choices]
        fitting = [e for _, e in estimates if e is not None]
        fitting.sort(key=lambda e: (e.seconds, e.choice))
        tried: list[Tried] = []
        best: tuple[Tried, Strategy] | None = None
        errors: dict[StrategyChoice, Exception] = {}
        byte_ratio: dict[StrategyChoice, float] = {}  # ratio of simulated to estimated bytes
        for k, e in enumerate(self._simulation_order(fitting, simulated)):
            # Enough whole steps were simulated and one fits; only plain choices are still worth it.
            if k >= simulated and best is not None and not e.choice.is_plain:
                break
            if k >= _MAX_SIMULATED:
                break
            # The estimate's error in bytes is taken to be equal for all ZeRO stages of the same
            # axes.
            same_axes = replace(e.choice, zero="data")
            if e.nbytes * byte_ratio.get(same_axes, 1.0) > self.memory:
                continue  # too large, if its estimate errs as that of an earlier choice did
            strategy = self._strategy(e)
            try:
                step = self._simulate_step(strategy)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                errors[e.choice] = error  # such as stages of a model that cannot be recorded
                continue
            tried.append(Tried(e.choice, step.seconds, step.peak_bytes, step))
            byte_ratio[same_axes] = step.peak_bytes / e.nbytes
            fits = step.peak_bytes <= self.memory
            if fits and (best is None or step.seconds < best[0].seconds):
                best = tried[-1], strategy
        if best is None:
            if errors and not tried:
                raise next(iter(errors.values()))
            raise self._no_fit_error(choices)
        fitting = [e for e in fitting if e.choice not in errors]
        simulated_choices = {each.choice for each in tried}
        tried = sorted(
            (t for t in tried if t.nbytes <= self.memory), key=lambda t: (t.seconds, t.choice)
        )
        tried += [
            Tried(e.choice, e.seconds, e.nbytes)
            for e in fitting
            if e.choice not in simulated_choices
        ]
        return Found(best[1], tuple(tried), len(choices), self.machine)

    def _simulation_order(
        self, fitting: Sequence[StrategyEstimate], simulated: int
    ) -> list[StrategyEstimate]:
        """Return the estimates in the order in which whole steps should be simulated.

        The ``simulated`` best come first, then plain strategies (one kind of parallelism, no
        micro-batches) that are not far behind, then the rest. Plain strategies move up because
        small programs have many overheads that an estimate does not know.
        """
        close_ones = [
            e for e in fitting[simulated:] if e.seconds <= _MAX_SLOWDOWN * fitting[0].seconds
        ]
        plain = [e for e in close_ones if e.choice.is_plain]
        others = [e for e in fitting[simulated:] if e not in plain]
        return [*fitting[:simulated], *plain, *others]

    # -- choices -----------------------------------------------------------------------------------

    def _choices(self, ranks: int) -> Iterator[StrategyChoice]:
        """Yield the strategies that are possible with these numbers of ranks, rows and units.

        Strategies whose parameters and gradients alone do not fit in the memory are left out.
        """
        for tensor in _divisors(ranks):
            if self.machine.ranks_per_host % tensor and tensor != ranks:
                continue  # tensor-parallel groups would cross hosts
            if tensor > self.machine.ranks_per_host:
                continue
            for stages in _divisors(ranks // tensor):
                if stages > len(self.units) or (stages > 1 and not self._is_called_in_order()):
                    continue
                data = ranks // tensor // stages
                if self.rows % data:
                    continue
                yield from self._choices_of_axes(stages, tensor, data)

    def _choices_of_axes(self, stages: int, tensor: int, data: int) -> Iterator[StrategyChoice]:
        """Yield the strategies with these degrees of parallelism, as in ``_choices``."""
        zeros = ("data", "zero1", "zero2", "zero3") if data > 1 else ("data",)
        for rows in self._micro_batch_sizes(self.rows // data, stages):
            for zero in zeros:
                shards = tensor * stages * (data if zero == "zero3" else 1)
                if 2 * self.numel / shards > self.memory:
                    continue
                for sequence in (False, True)[: 1 + (tensor > 1)]:
                    for recompute in (False, True)[: 1 + bool(self._units_with_children())]:
                        count = self.rows // data // rows
                        yield StrategyChoice(
                            stages, tensor, data, zero, sequence, recompute, rows, count
                        )

    def _micro_batch_sizes(self, rows: int, stages: int) -> list[int]:
        """Return the sizes of micro-batches to try, in rows, the largest first.

        ``rows`` is the number of rows of a data-parallel rank. Powers of two are preferred. Without
        pipeline stages smaller micro-batches gain nothing, so all rows at once are tried too if
        they are few.
        """
        sizes = [n for n in reversed(_divisors(rows)) if n <= _MAX_ROWS]
        sizes.sort(key=lambda n: n & (n - 1) != 0)
        all_rows = [rows] if stages == 1 and rows <= _MAX_WHOLE_ROWS else []
        return sorted({*sizes[:_MAX_SIZES], *all_rows}, reverse=True)

    def _is_called_in_order(self) -> bool:
        return self._followed_units(1).in_order

    # -- costs -------------------------------------------------------------------------------------

    def _followed_units(self, rows: int) -> RecordedCalls:
        """Return the (cached) record of a run of the model on a micro-batch of ``rows`` rows."""
        if rows not in self._followed:
            micro_batch = narrow_batch(self.batch, self.rows, 0, rows)
            self._followed[rows] = record_calls(
                self.model, self.units, self.loss, micro_batch, self.machine, self.bound
            )
        return self._followed[rows]

    def _simulate_units(self, choices: Sequence[StrategyChoice]) -> None:
        """Simulate the units in all sizes that ``choices`` need, and store their costs."""
        rows_by_plan: dict[tuple[int, bool], set[int]] = {}
        for choice in choices:
            rows_by_plan.setdefault((choice.tensor, choice.sequence), set()).add(choice.rows)
        for (tensor, sequence), sizes in rows_by_plan.items():
            calls = {}
            for rows in sorted(sizes):
                for call in self._followed_units(rows).calls:
                    calls.setdefault((rows, call.kind), call)
            plan = "data" if tensor == 1 else "tensor+sequence" if sequence else "tensor"
            costs = CostSimulator(self.machine, tensor, plan, self.loss, self.optimizer, self.bound)
            try:
                call_costs = costs.simulate_calls(self.model, calls.items())
            except ValueError:  # the plan does not fit the model
                continue
            for rows in sizes:
                followed = self._followed_units(rows)
                by_name = self._costs_by_name(followed, rows, call_costs)
                self._costs[tensor, sequence, rows] = [by_name[unit.name] for unit in self.units]

    def _costs_by_name(
        self, followed: RecordedCalls, rows: int, call_costs: Mapping[Any, Cost]
    ) -> dict[str, Cost]:
        """Return unit name -> its cost, summed over its calls; the last unit includes the loss.

        ``call_costs`` has the cost of each (rows, kind of call).
        """
        unit_costs: dict[str, Cost] = {unit.name: Cost() for unit in self.units}
        for call in followed.calls:
            name = call.name or followed.calls[-2].name
            first = unit_costs[name] == Cost()
            unit_costs[name] = _sum_costs(
                unit_costs[name], call_costs[rows, call.kind], first or not call.name
            )
        return unit_costs

    def _estimate(self, choice: StrategyChoice) -> StrategyEstimate | None:
        costs = self._costs_of(choice)
        return None if costs is None else estimate(choice, costs, self.machine, self.memory)

    def _costs_of(self, choice: StrategyChoice) -> list[Cost] | None:
        key = self._costs_key(choice)
        costs = self._costs.get(key)
        if costs is None or not choice.recompute:
            return costs
        if key not in self._recomputed_costs:
            recomputed_names = set(self._units_to_recompute(choice.rows))
            self._recomputed_costs[key] = [
                cost.with_recomputation() if unit.name in recomputed_names else cost
                for unit, cost in zip(self.units, costs, strict=True)
            ]
        return self._recomputed_costs[key]

    def _units_to_recompute(self, rows: int) -> list[str]:
        """Return the names of the units that are recomputed in backward, if a choice recomputes.

        These are the units with child modules of which the model has several equal ones, such as
        its layers; if there are none, all units with child modules.
        """
        kinds: dict[Any, list[str]] = {}
        for call in self._followed_units(rows).calls[:-1]:
            kinds.setdefault(call.kind, []).append(call.name)
        repeated = [name for names in kinds.values() if len(names) > 1 for name in names]
        candidates = self._units_with_children()
        return [name for name in candidates if name in repeated] or candidates

    def _units_with_children(self) -> list[str]:
        """Return the names of the units that have child modules."""
        return [u.name for u in self.units if any(True for _ in u.module.children())]

    # -- whole steps -------------------------------------------------------------------------------

    def _strategy(self, e: StrategyEstimate) -> Strategy:
        split = [self.units[end].name for end in e.ends[:-1]]
        recomputed_names = self._units_to_recompute(e.choice.rows)
        return strategy_for(self.model, e.choice, split, recomputed_names, self.machine.device_type)

    def _simulate_step(self, strategy: Strategy) -> SimulatedStep:
        """Simulate a whole training step under ``strategy``, and return its report."""
        with simulate(self.ranks, self.machine, bound=self.bound) as sim:
            on_meta = all(p.is_meta for p in self.model.parameters())
            model = copy.deepcopy(self.model) if on_meta else imagined_copy(sim, self.model)
            sim.stage_kinds = self._stage_kinds(strategy)
            pipe = strategy.apply(model, self.loss)
            optimizer = self.optimizer(model.parameters())
            for p in model.parameters():  # the optimizer's state is there before the step
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            optimizer.step()
            optimizer.zero_grad()
            args, kwargs, target = map_tensors(
                self.batch, lambda x: torch.empty(x.shape, dtype=x.dtype) if x.is_meta else x
            )
            pipe.step(kwargs or args, target)
            optimizer.step()
        return sim.report()

    def _stage_kinds(self, strategy: Strategy) -> list[Hashable]:
        """Return a key for the contents of each stage, so that equal stages are simulated once.

        It has the kind of each unit, and whether the unit is recomputed in backward.
        """
        if strategy.stages == 1:
            return []
        rows = self.rows // strategy.data // strategy.micro_batches
        kinds = {call.name: call.kind for call in self._followed_units(rows).calls}
        names = [unit.name for unit in self.units]
        begins = [0, *map(names.index, strategy.split), len(names)]
        recomputed_names = set(strategy.checkpoint)
        return [
            tuple((kinds[name], name in recomputed_names) for name in names[a:b])
            for a, b in itertools.pairwise(begins)
        ]

    # -- error message -----------------------------------------------------------------------------

    def _no_fit_error(self, choices: Sequence[StrategyChoice]) -> ValueError:
        name = type(self.model).__name__
        ranks, least_bytes = self.ranks, self._least_bytes(choices)
        shortage = (
            ""
            if least_bytes is None
            else f"\n  The smallest that was tried holds {least_bytes:,} bytes, {{}}."
        )
        if least_bytes is not None:
            excess = least_bytes - self.memory
            shortage = shortage.format(f"{excess:,.0f} too many" if excess > 0 else "as estimated")
        # Double the number of ranks until the smallest choice fits.
        while ranks == self.ranks or least_bytes is None or least_bytes > self.memory:
            ranks *= 2
            if ranks > _MAX_RANKS:
                return ValueError(
                    f"search: no strategy for {name} fits in {self.memory:,.0f} bytes a rank, on "
                    "any number of ranks: one of its parts with what it computes is larger.\n"
                    "  Its parts are not split by tensor parallelism, or a row of the batch is too "
                    "large.\n  Take a machine with more memory, or shorter rows."
                )
            choices_there = list(self._choices(ranks))
            self._simulate_units(
                [c for c in choices_there if self._costs_key(c) not in self._costs]
            )
            least_bytes = self._least_bytes(choices_there)
        return ValueError(
            f"search: no strategy for {name} fits in {self.memory:,.0f} bytes a rank on "
            f"{self.ranks} ranks.{shortage}\n"
            f"  It fits on {ranks} ranks; or take more memory, or a smaller batch."
        )

    def _costs_key(self, choice: StrategyChoice) -> tuple[int, bool, int]:
        return choice.tensor, choice.sequence, choice.rows

    def _least_bytes(self, choices: Sequence[StrategyChoice]) -> int | None:
        """Return the bytes that the least demanding of ``choices`` needs.

        None: none of them has known costs.
        """
        sizes = [
            smallest_bytes(choice, costs, self.machine)
            for choice in choices
            if (costs := self._costs_of(choice)) is not None
        ]
        return min(sizes, default=None)


def _sum_costs(a: Cost, b: Cost, with_params: bool) -> Cost:
    """Return the summed cost ``a`` + ``b`` of two calls of one unit.

    ``with_params`` tells whether the parameters of ``b`` count too; otherwise both calls use those
    of ``a``.
    """
    return replace(
        a,
        forward=a.forward + b.forward,
        backward=a.backward + b.backward,
        activation_bytes=a.activation_bytes + b.activation_bytes,
        result=b.result or a.result,
        extra_bytes=max(a.extra_bytes, b.extra_bytes),
        params=a.params + (b.params if with_params else 0),
        trainable_bytes=a.trainable_bytes + (b.trainable_bytes if with_params else 0),
        state=a.state + (b.state if with_params else 0),
        step=a.step + (b.step if with_params else 0),
        host_seconds=a.host_seconds + (b.host_seconds if with_params else 0),
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check(model: Any, ranks: Any, memory: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"search: the model is {model!r:.80}, of type {type(model).__name__}, and no "
            "torch.nn.Module. Give the module; loss= and target= say what is trained."
        )
    if "_consistent_plan" in model.__dict__:
        raise ValueError(
            f"search: this {type(model).__name__} is parallelized already, and a strategy is "
            "searched for a module as it was built. Build it again, on meta if it is large."
        )
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"search: ranks={ranks!r} is not a number of ranks. Give 1 or more.")
    if memory is not None and not memory > 0:
        raise ValueError(f"search: memory={memory!r} is not a number of bytes. Give more than 0.")
