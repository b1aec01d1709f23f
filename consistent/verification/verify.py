"""Check that a step computes the numbers of one process under plans and in other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..drawing.files import write
from ..spec import SbpLike
from .compare import Compared, Reference, differences, in_modules, merge_ranks, until_first_choice
from .worlds import RunResult, Step, StepSetting, run

# Seconds that one process may take: without its numbers there is nothing to compare with.
REFERENCE_SECONDS = 600.0
# How many times longer than one process a plan or program may take, on a busy machine too.
LIMIT_FACTOR = 5


@dataclass
class Verified:
    """Result of ``verify``: print it, ``save`` it as an HTML page, or ``check`` it in a test.

    Attributes:
        results: the comparison of each plan, and then of each program, with one process.
        draws: whether the step draws random numbers.
    """

    results: list[Compared]
    draws: bool = False

    @property
    def ok(self) -> bool:
        """True if every plan and program has the numbers of one process, up to rounding."""
        return all(each.ok for each in self.results)

    def check(self) -> None:
        """Raise if a tensor differs, for use in a test.

        Raises:
            AssertionError: with the text of the result.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        lines = [str(each) for each in self.results]
        if self.draws:
            lines.append(
                "The step draws random numbers. Those of global tensors are the same on any number "
                "of ranks, but not torch's own, so plans were held against one rank under a plan."
            )
        return "\n".join(lines)

    def html(self) -> str:
        """Return the result as one self-contained HTML page."""
        from .page import page  # loaded only if a page is wanted

        return page(self.results)

    def save(self, path: str | Path) -> Path:
        """Write the HTML page to ``path``; missing folders are created."""
        return write(path, self.html())


def verify(
    step: Step,
    plans: Sequence[Any] = (),
    *,
    programs: Mapping[str, Step] | None = None,
    ranks: int = 2,
    grid: Sequence[int] | None = None,
    batch: SbpLike | None = None,
    seconds: float = 120.0,
) -> Verified:
    """Run a step on one process and under each plan, and name the first tensor that differs.

    Every result of an op, every gradient, and parameters before and after an optimizer's step are
    compared. The size of rounding errors is measured: the step also runs in float64, and the error
    of one process in its own dtype shows how large an error another order of sums may cause. Where
    rounding changes a choice, such as the experts of a router, later tensors belong to a different
    computation; they are not compared, and the result says so. Nothing runs in the calling process,
    and no GPU is needed. Ranks are forks of the calling process, so the step may be any function.
    Where torch cannot run backward in forks, because CUDA is in use or a torch built for CUDA has
    run a backward before, they are new processes, which import the step by its name.

    Args:
        step: ``step(place)`` builds its model, wraps it in ``place(model)``, and trains it a step
            or more on whole batches, the same in each process: seed inside. What it returns, such
            as a loss, is compared too.
        plans: each as ``parallelize`` takes it.
        programs: name -> another program that should do the same on ``ranks`` ranks, by DDP, FSDP2,
            DTensor or by hand. It calls ``place(model)``, too, which then only names the model's
            parts. Its parameters and their gradients must be whole, or DTensors; its activations
            may be shards or partial sums of the correct ones.
        ranks: the number of processes for each plan and program.
        grid: the shape of the placement for plans of several axes, such as ``(2, 2)``.
        batch: the layout that the model's batch gets under a plan; by default split along dim 0 by
            the first axis.
        seconds: a plan or program that runs longer, and more than five times as long as one process
            did, is ended and reported to hang.

    Returns:
        The result: ``print`` it, ``save`` it as a page, ``check()`` it in a test.

    Raises:
        RuntimeError: this process is a rank itself; the step raises on one process; or ranks can
            neither be forked nor import the step.
    """
    _check_no_rank()
    single = run(step, StepSetting(), REFERENCE_SECONDS)
    reference = _reference(step, single, StepSetting(double=True))
    under_plans, draws = reference, single.draws and bool(plans)
    # Random numbers of global tensors differ from torch's for plain tensors, so the reference for
    # plans is one rank under a plan.
    if draws:
        one_rank = StepSetting(plan=plans[0] if isinstance(plans[0], str) else "data", batch=batch)
        under_plans = _reference(
            step, run(step, one_rank, REFERENCE_SECONDS), replace(one_rank, double=True)
        )
    limit = max(seconds, LIMIT_FACTOR * single.seconds)
    worlds = [StepSetting(ranks, plan, tuple(grid) if grid else None, batch) for plan in plans]
    results = [
        _compare(_plan_name(world.plan), under_plans, run(step, world, limit)) for world in worlds
    ]
    for name, program in (programs or {}).items():
        ran = run(program, StepSetting(ranks), limit)
        results.append(_compare(name, reference, ran, by_another=True))
    return Verified(results, draws)


def _check_no_rank() -> None:
    """Raise if this process is a rank itself."""
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "verify: this process is a rank already, and verify starts ranks of its own.\n"
            "  Call it in a program of one process, without torchrun and init_process_group."
        )


def _reference(step: Step, single: RunResult, double: StepSetting) -> Reference:
    """Return the reference values: those of the run ``single``, and of a run in float64.

    ``double`` is the setting of the float64 run. If the step raises in float64, there are no
    float64 values.

    Raises:
        RuntimeError: the step raised on one process.
    """
    if single.error:
        raise RuntimeError(f"verify: the step raises on one process.\n{single.error}")
    exact = run(step, double, REFERENCE_SECONDS)
    return Reference(merge_ranks(single.seen), {} if exact.error else merge_ranks(exact.seen))


def _compare(name: str, right: Reference, ran: RunResult, by_another: bool = False) -> Compared:
    """Return the comparison of the run ``ran`` with the reference ``right``.

    ``by_another`` is True if another program ran, of whose ops only those in modules are compared.
    """
    if by_another:
        right = Reference(in_modules(right.single), right.double)
    tensors = merge_ranks(ran.seen)
    if ran.error:  # tensors that only some of the ranks have recorded cannot be put together
        tensors = {
            key: tensor for key, tensor in tensors.items() if len(tensor.parts) == len(ran.seen)
        }
    tensors, choice = until_first_choice(right, tensors)
    result = Compared(name, differences(right, tensors), len(tensors), ran.error)
    if choice is not None:
        result.choice, result.left = choice
    return result


def _plan_name(plan: Any) -> str:
    return plan if isinstance(plan, str) else repr(plan)
