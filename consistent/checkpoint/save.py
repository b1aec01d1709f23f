"""save: write objects to a checkpoint that is whole or not there."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from mirrored.transports.default import current
from mirrored.transports.faults.handlers import refuse_in_handler

from ..dispatch.plans.shards import is_global
from ..spec.nearest import suggestion
from .agreement import CheckpointError, from_first, on_every_rank
from .contents.collect import Contents, collect
from .contents.random_state import RandomState
from .saving import folders, owner
from .saving.background import Background
from .saving.copies import Copies
from .saving.folders import Begun
from .saving.job import Job, complete, write_part
from .saving.planning import Note, Plan, Planner, check_alike, data_of

_running: Background | None = None
_copies = Copies()
_planner = Planner()


def save(
    folder: str | os.PathLike,
    /,
    *,
    step: int | None = None,
    keep: int | None = 3,
    wait: bool = True,
    random: bool = True,
    **objects: Any,
) -> str:
    """Save objects into a new checkpoint in ``folder``. A collective of all ranks of the world.

    ```
    save("run", model=model, optimizer=optimizer, scheduler=scheduler, step=120)
    state = load("run", model=model, optimizer=optimizer, scheduler=scheduler)
    ```

    Each tensor is written once, piece by piece, by the ranks that hold it; replicated ones are
    spread over them. The checkpoint is written under another name and renamed when all ranks have
    written and synced their files. If a rank cannot write, all ranks raise, and the checkpoints
    that were there stay.

    Args:
        folder: the folder of the checkpoints of this run; it must be the same for all ranks.
        step: names the checkpoint, ``step-00000120``; ``load`` gives it back as ``"step"``.
        keep: how many checkpoints to keep, this one included; None for all.
        wait: False copies what this rank writes aside and writes it in a thread. The next ``save``,
            ``load`` or ``wait`` waits for it, and raises on every rank if it failed on one. The
            memory of the copies is kept for the next save of this kind.
        random: save the states of torch's, Python's and numpy's random generators too.
        objects: modules, optimizers, and anything with a ``state_dict`` (schedulers, loaders), and
            values: tensors, numbers, texts, and lists and dictionaries of them. The state of an
            optimizer is saved by the names that its parameters have in the modules given.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: it could not be saved, or another job that runs saves into ``folder``; the
            message says what each rank met.
    """
    if current().size > 1:
        refuse_in_handler("checkpoint.save")
    wait_for_last()
    _warn_of_options(objects)
    if step is not None:
        objects = {**objects, "step": step}
    if random:
        objects = {**objects, "random": RandomState()}
    options = (os.fspath(folder), step, keep, wait)
    what = f"checkpoint.save to {options[0]!r}"
    contents, begun, notes = _agree(what, options, objects)
    job = _job(contents, begun, step, keep, _planner.plan_of(notes, current().rank))
    if wait:
        _write_now(what, job)
    else:
        _write_later(what, job)
    return begun.path


def _warn_of_options(objects: dict[str, Any]) -> None:
    """A name that is nearly that of an option, of a value that the option could have, is saved as
    it was given, and may have been meant otherwise."""
    for name, given in objects.items():
        like = [option for option, kind in _OPTIONS.items() if type(given) is kind]
        near = suggestion(name, like, 0.75) if not name.startswith(tuple(like)) else ""
        if near:
            warnings.warn(
                f"checkpoint.save: {name}={given!r} is saved as a value of that name.{near} "
                "Options are step, keep, wait and random.",
                stacklevel=3,
            )


_OPTIONS = {"step": int, "keep": int, "wait": bool, "random": bool}


def wait() -> None:
    """Wait for a save that was begun with ``wait=False``. A collective of all ranks.

    Raises:
        CheckpointError: it failed on some rank.
    """
    wait_for_last()


def wait_for_last() -> None:
    """``wait``, under a name that no parameter has."""
    global _running
    running, _running = _running, None
    if running is None:
        return
    what = f"checkpoint.save to {running.path!r}, which ran in the background"
    try:
        on_every_rank(what, running.own_part)  # here a rank that has died is noticed
        on_every_rank(what, running.outcome)
    except CheckpointError:
        running.join()
        raise


def give_up_running() -> None:
    """Let go a save that runs in the background, since not all of its ranks are there any more.
    Nothing is sent; it waits until this rank writes no longer."""
    global _running
    running, _running = _running, None
    if running is not None:
        running.give_up()


def _agree(
    what: str, options: tuple[Any, ...], objects: dict[str, Any]
) -> tuple[Contents, Begun, list[Note]]:
    """What this rank saves, where, and what all ranks have to save."""
    made: list[Contents] = []
    begun: list[Begun] = []

    def look() -> tuple[Note, Begun | None]:
        folder, step, keep, _ = options
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}, and the new one is kept: give 1 or more, or None.")
        made.append(collect(objects))
        note = _planner.note_of(made[0], options)
        if current().rank == 0:
            begun.append(folders.begin(folder, step))
        else:
            owner.release(folders.mark_of(folder))  # it was rank 0 of a world before
        return note, begun[0] if begun else None

    try:
        told = on_every_rank(what, look)
        notes = [note for note, _ in told]
        check_alike(what, notes)
        _planner.hear(what, made[0], notes)
    except Exception:
        if begun:
            folders.give_up(begun[0])
        raise
    where = told[0][1]
    assert where is not None
    return made[0], where, notes


def _job(contents: Contents, begun: Begun, step: int | None, keep: int | None, plan: Plan) -> Job:
    tensors = {name: _reduced(x) for name, x in contents.tensors.items()}
    mine = [(i.index, _name_in_file(i), data_of(i, tensors)) for i in plan.mine]
    transport = current()
    return Job(
        begun, transport.rank, transport.size, step, keep, plan.tensors, mine,
        contents.values, contents.kinds, contents.aliases, plan.differing,
    )  # fmt: skip


def _reduced(x: Any) -> torch.Tensor:
    """The tensor as it is saved: with B where it is P, and in one box on each rank."""
    if is_global(x) and x._spec.settled.plain is not x._spec:
        return x.detach().to_global(sbp=x._spec.settled.plain.sbp)
    return x


def _name_in_file(item: Any) -> str:
    """The name of a piece, as a slice of its tensor where it is not all of it."""
    data = item.tensor_data
    start, size = data.chunk.offsets, data.chunk.sizes
    if tuple(size) == tuple(data.size):
        return item.index.fqn
    return f"{item.index.fqn}[{', '.join(f'{a}:{a + n}' for a, n in zip(start, size))}]"  # noqa: B905


def _write_now(what: str, job: Job) -> None:
    try:
        parts = on_every_rank(what, lambda: write_part(job))
        from_first(what, lambda: complete(job, parts))
    except BaseException:
        if job.rank == 0:
            folders.give_up(job.begun)
        raise


def _write_later(what: str, job: Job) -> None:
    global _running
    copies = _copies.of([x for _, _, x in job.mine])
    job.mine = [(index, name, x) for (index, name, _), x in zip(job.mine, copies, strict=True)]
    _running = Background(job)
