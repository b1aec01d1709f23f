"""``simulate``: run a training program as on any number of ranks, in one process."""

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
from ...dispatch.plans.plan import looked_up_in
from ...dispatch.plans.shards import is_global
from ...movement import plain_values
from ...movement.speeds import simulated_costs
from ...nn.sharded import prefetch
from ...nn.sharded.master_weights import masters_of
from ...nn.sharded.step import install_hooks
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
from .transport import Simulated
from .values import Reading, Values

_Off = torch._C.DisableTorchFunction
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
        self._kinds: dict[int, str] = {}
        self._report: SimulatedStep | None = None

    @property
    def events(self) -> list[Any]:
        """All events so far, in order."""
        return self._log.events

    def calls_of(
        self, modules: Iterable[tuple[str, torch.nn.Module]]
    ) -> AbstractContextManager[None]:
        """Return a context manager inside which calls of the named ``modules`` are events, too."""
        return calls.logged(self._log, self.imagined.memory, modules)

    def report(self) -> SimulatedStep:
        """Return what a step takes: seconds, memory and bytes; of several steps, the last one.

        Raises:
            RuntimeError: nothing ran.
        """
        if self._report is None or self._report.events != len(self._log.events):
            self._report = report(self._log, self.machine, self.ranks, self._kinds)
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
    """Run a program as on ``ranks`` ranks inside the ``with`` block, in this process alone.

    No message is sent, and large tensors are neither computed nor allocated.

    ```
    with consistent.simulate(ranks=4096, machine="a100-8") as sim:
        P = consistent.placement("cuda", range(4096))
        model = consistent.parallelize(GPT(config), P, "zero3")
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer, batch)
    print(sim.report())
    ```

    A step ends with ``optimizer.step()``. One warm-up step and a second one show which memory
    lasts. Values that a program reads (``loss.item()``) are 0.

    Args:
        ranks: the size of the world.
        machine: a name ("a100-8", "h100-8", "h200-8"; "this" is measured), the path of a machine
            file, or a Machine.
        rank: the rank to follow. Without it the process acts in every placement as the rank with
            the largest pieces, so that all stages are followed.
        bound: the share of elements that an op keeps if that depends on values (masks,
            ``nonzero``).

    Raises:
        RuntimeError: a process group is in use, or another simulation is active; or, inside, the
            program needs a value.
        ValueError: ``ranks``, ``rank``, ``bound`` or the machine is wrong.
    """
    found = _checked(ranks, machine, rank, bound)
    log = Log()
    made = Simulation(found, ranks, log)
    callers = Callers()
    values = Values(log, bound, lambda x: x if imagined.memory.number(x) is None else None)
    with ExitStack() as inside:
        transport = Simulated(
            ranks,
            rank,
            lambda shape, dtype, receiver: imagined.empty(shape, dtype, receiver),
            lambda x: imagined.memory.holder(x),
            lambda *args, **kwargs: _note(log, callers.sending(), *args, **kwargs),
            lambda kind: found.link(ranks),
            lambda group: _same_host(group, found),
        )
        imagined = Imagined(
            log,
            values,
            lambda p, given: transport.rank_with(given) if p is None else _in(p),
            callers.now,
            views=not found.host_overlaps,
            recency=CacheModel(found.cache_bytes) if found.cache_bytes else None,
        )
        _in, made.imagined = transport.rank_in, imagined
        inside.enter_context(simulated_world(ranks, found.device_type == "cuda"))
        inside.enter_context(looked_up_in(_C.PlanTable()))  # plans of the simulated world
        inside.enter_context(_own_numbers())
        inside.enter_context(replace_current(transport))
        inside.enter_context(simulated_costs(found))
        inside.enter_context(prefetch.switched_off(messages=False))
        inside.enter_context(plain_values.plain_may_differ())
        inside.enter_context(callers.observing())
        note = _noting(made._kinds, imagined, transport.rank_in)
        inside.enter_context(_marks(log, note))
        inside.enter_context(
            stages.played(log, transport, imagined, note, lambda: made.stage_kinds)
        )
        if found.device_type == "cuda":
            inside.enter_context(OnCpu())
        tracer = Tracer(lacks_values=lambda x: imagined.memory.number(x) is not None)
        inside.enter_context(tracer.tracing())
        inside.enter_context(Reading(imagined.memory, log))
        inside.enter_context(imagined)
        # Runs first at exit: memory freed after the block is not part of the program.
        inside.callback(imagined.memory.close)
        yield made


def _checked(ranks: Any, name: Any, rank: Any, bound: Any) -> Machine:
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            f"simulate: a process group of {dist.get_world_size()} ranks is in use here.\n"
            "  A simulated program has a world of its own, and would take it for the real one.\n"
            "  Simulate in a process of its own, without torchrun and init_process_group()."
        )
    if isinstance(current(), Simulated):
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


def _same_host(group: Ranks, found: Machine) -> bool:
    return found.shares_memory and len({r // found.ranks_per_host for r in group}) == 1


def _note(
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
    sent = Message(rank, name, nbytes, ranks, user_line(), start, wait, tensors, caller)
    log.events.append(sent)


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Restore the state of torch's random generator after the ``with`` block.

    A simulation then does not change the numbers that the program draws later.
    """
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _noting(
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
        with _Off():
            for x in tensors_in(tensors):
                number = imagined.memory.number(x)
                if number is not None:
                    kinds[number] = kind
                    if is_global(x):
                        imagined.memory.give(number, rank_in(x._spec.placement))  # type: ignore[attr-defined]

    return note


@contextmanager
def _marks(log: Log, note: Callable[[Any, str], None]) -> Iterator[None]:
    """Log where forwards begin and optimizer steps end, inside the ``with`` block.

    ``note`` is called with the tensors that last between steps: parameters, gradients and states.
    """
    running = False

    def forward(module: Any, args: Any) -> None:
        nonlocal running
        if not running:
            running = True
            log.events.append(Mark("forward"))
            note(list(module.parameters()), "parameters")
            note(list(module.buffers()), "parameters")

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal running
        running = False
        params = [p for group in optimizer.param_groups for p in group["params"]]
        note(params, "parameters")
        with _Off():
            note([g for p in params if (g := _T.grad.__get__(p)) is not None], "gradients")  # type: ignore[attr-defined]
        note([list(state.values()) for state in optimizer.state.values()], "optimizer")
        if (masters := masters_of(optimizer)) is not None:
            note(list(masters.copies.values()), "optimizer")
        log.events.append(Mark("step"))

    install_hooks()  # the library's hooks run first, so that what they send belongs to the step
    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(forward),
        register_optimizer_step_post_hook(stepped),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
