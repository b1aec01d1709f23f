"""``simulate``: run a training program as if on any number of ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mirrored.comm import Ranks
from mirrored.transports.default import current, replace_current
from mirrored.transports.faults.place import user_line

from ...cost_model.model import Caller
from ...dispatch import _C
from ...dispatch.plans.plan import use_plan_table
from ...dispatch.plans.shards import is_global
from ...movement import plain_values
from ...movement.speeds import simulated_costs
from ...nn.sharded import prefetch
from ...nn.sharded.master_weights import masters_of
from ...nn.sharded.step import install_step_hooks
from ...spec.nested import tensors_in
from ...spec.tracer import Tracer
from ..machines import Machine
from ..machines.find import machine
from . import calls, stages
from .cache_model import CacheModel
from .callers import Callers
from .devices import OnCpu, simulated_world
from .imagined import Imagined
from .log import Log, Mark, Message
from .report import SimulatedStep, report
from .transport import SimulatedTransport
from .values import ReadRecorder, Values

_DisableTorchFunction = torch._C.DisableTorchFunction
_T = torch.Tensor


class Simulation:
    """A simulation in progress, which ``simulate`` yields; ``report()`` returns its results.

    Args:
        machine, ranks: the machine, and the number of ranks of the world.
        log: the events of the program.
    """

    imagined: Imagined
    """The mode that makes the tensors of the program."""
    stage_kinds: Sequence[Hashable] = ()
    """Kind of each stage; stages of one kind have equal parts. Empty if not known."""

    def __init__(self, machine: Machine, ranks: int, log: Log) -> None:
        self.machine, self.ranks = machine, ranks
        self._log = log
        self._memory_kinds: dict[int, str] = {}
        self._report: SimulatedStep | None = None

    @property
    def events(self) -> list[Any]:
        """All events so far, in order."""
        return self._log.events

    def calls_of(
        self, modules: Iterable[tuple[str, torch.nn.Module]]
    ) -> AbstractContextManager[None]:
        """Return a context manager inside which calls of the named ``modules`` are events, too."""
        return calls.log_calls(self._log, self.imagined.memory, modules)

    def report(self) -> SimulatedStep:
        """Return the report of the last step: its seconds, memory and bytes sent.

        Raises:
            RuntimeError: nothing ran.
        """
        if self._report is None or self._report.events != len(self._log.events):
            self._report = report(self._log, self.machine, self.ranks, self._memory_kinds)
        return self._report

    def __str__(self) -> str:
        return str(self.report())


@contextmanager
def simulate(
    ranks: int,
    machine: str | Machine = "this",
    *,
    rank: int | None = None,
    bound: float | None = None,
) -> Iterator[Simulation]:
    """Run a program as if on ``ranks`` ranks inside the ``with`` block, in this one process.

    No message is sent, and large tensors are neither computed nor allocated.

    ```
    with consistent.simulate(ranks=4096, machine="a100-8") as sim:
        P = consistent.placement("cuda", range(4096))
        model = consistent.parallelize(GPT(config), P, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer, batch)
    print(sim.report())
    ```

    A step ends with ``optimizer.step()``. Run two steps: the first, a warm-up, shows which memory
    lasts between steps. Values that a program reads (``loss.item()``) are 0.

    Args:
        ranks: the size of the world.
        machine: a name ("a100-8", "h100-8", "h200-8"; "this" is measured), the path of a machine
            file, or a Machine.
        rank: the rank to follow. Without it the process acts in every placement as the rank with
            the largest shards, so that all stages are followed.
        bound: the share of elements that an op keeps if that depends on values (masks,
            ``nonzero``).

    Raises:
        RuntimeError: a process group is in use, or another simulation is active; or, inside, the
            program needs a value.
        ValueError: ``ranks``, ``rank``, ``bound`` or the machine is wrong.
    """
    target = _checked_machine(ranks, machine, rank, bound)
    log = Log()
    simulation = Simulation(target, ranks, log)
    callers = Callers()
    values = Values(log, bound, lambda x: x if imagined.memory.number(x) is None else None)
    with ExitStack() as stack:
        transport = SimulatedTransport(
            ranks,
            rank,
            lambda shape, dtype, receiver: imagined.empty(shape, dtype, receiver),
            lambda x: imagined.memory.rank_of(x),
            lambda *args, **kwargs: _log_message(log, callers.message_caller(), *args, **kwargs),
            lambda kind: target.link(ranks),
            lambda group: _same_host(group, target),
        )
        imagined = Imagined(
            log,
            values,
            lambda p, tensors: transport.rank_with(tensors) if p is None else rank_in(p),
            callers.op_caller,
            views=not target.host_overlaps,
            recency=CacheModel(target.cache_bytes) if target.cache_bytes else None,
        )
        rank_in, simulation.imagined = transport.rank_in, imagined
        stack.enter_context(simulated_world(ranks, target.device_type == "cuda"))
        stack.enter_context(use_plan_table(_C.PlanTable()))  # plans of the simulated world
        stack.enter_context(_preserved_rng_state())
        stack.enter_context(replace_current(transport))
        stack.enter_context(simulated_costs(target))
        stack.enter_context(prefetch.prefetch_off(messages=False))
        stack.enter_context(plain_values.plain_may_differ())
        stack.enter_context(callers.observing())
        note = _kind_recorder(simulation._memory_kinds, imagined, transport.rank_in)
        stack.enter_context(_log_steps(log, note))
        stack.enter_context(
            stages.simulate_schedules(
                log, transport, imagined, note, lambda: simulation.stage_kinds
            )
        )
        if target.device_type == "cuda":
            stack.enter_context(OnCpu())
        tracer = Tracer(lacks_values=lambda x: imagined.memory.number(x) is not None)
        stack.enter_context(tracer.tracing())
        stack.enter_context(ReadRecorder(imagined.memory, log))
        stack.enter_context(imagined)
        # Runs first at exit: memory freed after the block is not part of the program.
        stack.callback(imagined.memory.close)
        yield simulation


def _checked_machine(ranks: Any, name: Any, rank: Any, bound: Any) -> Machine:
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            f"simulate: a process group of {dist.get_world_size()} ranks is in use here.\n"
            "  A simulated program has a world of its own, and would take it for the real one.\n"
            "  Simulate in a process of its own, without torchrun and init_process_group()."
        )
    if isinstance(current(), SimulatedTransport):
        raise RuntimeError(
            "simulate: a simulation goes on already, and worlds do not lie in one another.\n"
            "  End its `with` block first."
        )
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"simulate: ranks={ranks!r} is not a number of ranks. Give 1 or more.")
    if rank is not None and (type(rank) is not int or not 0 <= rank < ranks):
        raise ValueError(
            f"simulate: rank={rank!r} is none of the {ranks} ranks. Give 0 to {ranks - 1}, or None."
        )
    if bound is not None and not 0 < bound <= 1:
        raise ValueError(
            f"simulate: bound={bound!r} is not a share of elements. "
            "Give a number above 0 and up to 1."
        )
    return machine(name).of(ranks)


def _same_host(group: Ranks, host_machine: Machine) -> bool:
    return (
        host_machine.shares_memory and len({r // host_machine.ranks_per_host for r in group}) == 1
    )


def _log_message(
    log: Log,
    caller: Caller,
    rank: int,
    name: str,
    nbytes: int,
    ranks: Ranks,
    start: int = 0,
    wait: int = 0,
    tensors: int = 1,
) -> None:
    message = Message(rank, name, nbytes, ranks, user_line(), start, wait, tensors, caller)
    log.events.append(message)


@contextmanager
def _preserved_rng_state() -> Iterator[None]:
    """Restore the state of torch's random generator after the ``with`` block.

    A simulation then does not change the numbers that the program draws later.
    """
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _kind_recorder(
    kinds: dict[int, str], imagined: Imagined, rank_in: Callable[[Any], int]
) -> Callable[[Any, str], None]:
    """Return a function of (tensors, kind) that notes which memory lasts between steps.

    Args:
        kinds: dict into which the function puts the kind ("parameters", "gradients", ...) of each
            memory, by its number.
        imagined: the mode that numbers the memory.
        rank_in: function of a placement that returns the rank to which the memory of its global
            tensors is attributed.
    """

    def note(tensors: Any, kind: str) -> None:
        with _DisableTorchFunction():
            for x in tensors_in(tensors):
                number = imagined.memory.number(x)
                if number is not None:
                    kinds[number] = kind
                    if is_global(x):
                        imagined.memory.set_rank(number, rank_in(x._spec.placement))  # type: ignore[attr-defined]

    return note


@contextmanager
def _log_steps(log: Log, note: Callable[[Any, str], None]) -> Iterator[None]:
    """Log where forwards begin and optimizer steps end, inside the ``with`` block.

    ``note`` is called with the tensors that last between steps: parameters, gradients and states.
    """
    in_step = False

    def begin_forward(module: Any, args: Any) -> None:
        nonlocal in_step
        if not in_step:
            in_step = True
            log.events.append(Mark("forward"))
            note(list(module.parameters()), "parameters")
            note(list(module.buffers()), "parameters")

    def end_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal in_step
        in_step = False
        params = [p for group in optimizer.param_groups for p in group["params"]]
        note(params, "parameters")
        with _DisableTorchFunction():
            note([g for p in params if (g := _T.grad.__get__(p)) is not None], "gradients")  # type: ignore[attr-defined]
        note([list(state.values()) for state in optimizer.state.values()], "optimizer")
        if (masters := masters_of(optimizer)) is not None:
            note(list(masters.copies.values()), "optimizer")
        log.events.append(Mark("step"))

    # The library's hooks run first, so that what they send belongs to the step.
    install_step_hooks()
    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(begin_forward),
        register_optimizer_step_post_hook(end_step),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
