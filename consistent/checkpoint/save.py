"""Writing objects into a new checkpoint, which appears complete or not at all (``save``)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mirrored.transports.default import current
from mirrored.transports.faults.handlers import refuse_in_handler

from ..dispatch.plans.shards import is_global
from ..spec.nearest import suggestion
from .agreement import CheckpointError, from_rank_0, on_every_rank
from .contents.collect import Contents, collect
from .contents.random_state import RandomState
from .saving import folders, owner
from .saving.background import BackgroundSave
from .saving.copies import CopyBuffer
from .saving.folders import UnfinishedCheckpoint
from .saving.job import Part, SaveJob, complete, write_part
from .saving.planning import Note, Planner, SaveDivision, check_equal_contents, data_of

_running_save: BackgroundSave | None = None
_copies = CopyBuffer()
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

    Each tensor is written once, piece by piece, by the ranks that hold it; the pieces of replicated
    tensors are spread over these ranks. The checkpoint is written under a temporary name and
    renamed when all ranks have written and synced their files. If a rank cannot write, all ranks
    raise, and the earlier checkpoints stay.

    Args:
        folder: the folder of the checkpoints of this run; it must be the same for all ranks.
        step: names the checkpoint, ``step-00000120``; ``load`` returns it as ``"step"``.
        keep: how many checkpoints to keep, this one included; None for all.
        wait: False copies this rank's pieces and writes the copies in a thread. The next ``save``,
            ``load`` or ``wait`` waits for the thread, and raises on every rank if copying or
            writing failed on one.
            The memory of the copies is kept for the next save with ``wait=False``.
        random: save the states of torch's, Python's and numpy's random generators too.
        objects: modules, optimizers, anything else with a ``state_dict`` (schedulers, loaders), and
            values: tensors, numbers, texts, and lists and dictionaries of them. The state of an
            optimizer is saved under the names that its parameters have in the given modules.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: the checkpoint could not be saved, or another running job saves into
            ``folder``; the message says what went wrong on each rank.
    """
    if current().size > 1:
        # In a signal handler the other ranks may be in another collective.
        refuse_in_handler("checkpoint.save")
    wait_for_last()
    _warn_of_options(objects)
    if step is not None:
        objects = {**objects, "step": step}
    if random:
        objects = {**objects, "random": RandomState()}
    options = (os.fspath(folder), step, keep, wait)
    what = f"checkpoint.save to {options[0]!r}"
    created: list[UnfinishedCheckpoint] = []
    try:
        contents, checkpoint, notes = _collect_and_compare(what, options, objects, created)
        tensors = {name: _to_saved_layout(x) for name, x in contents.tensors.items()}

        def job() -> SaveJob:
            plan = _planner.plan_of(notes, current().rank)
            return _make_job(contents, tensors, checkpoint, step, keep, plan)

        if wait:
            _write_now(what, job)
        else:
            _write_later(checkpoint, job)
    except BaseException:  # also KeyboardInterrupt, so that no unfinished folder stays
        for each in created:
            folders.give_up(each)
        raise
    return checkpoint.path


def _warn_of_options(objects: dict[str, Any]) -> None:
    """Warn about an object that may be a mistyped option of ``save``, such as ``setp=1``.

    Its name is close to that of an option, and its value has the option's type. It is saved under
    the name given.
    """
    for name, value in objects.items():
        same_type = [option for option, kind in _OPTIONS.items() if type(value) is kind]
        hint = suggestion(name, same_type, 0.75) if not name.startswith(tuple(same_type)) else ""
        if hint:
            warnings.warn(
                f"checkpoint.save: {name}={value!r} is saved as a value of that name.{hint} "
                "Options are step, keep, wait and random.",
                stacklevel=3,
            )


_OPTIONS = {"step": int, "keep": int, "wait": bool, "random": bool}


def wait() -> None:
    """Wait for a save that was started with ``save(wait=False)``. A collective of all ranks.

    Raises:
        CheckpointError: the save failed on some rank.
    """
    wait_for_last()


def wait_for_last() -> None:
    """Do what ``wait`` does, for callers such as ``save``, whose parameter ``wait`` hides it."""
    global _running_save
    background, _running_save = _running_save, None
    if background is None:
        return
    what = f"checkpoint.save to {background.path!r}, which ran in the background"
    try:
        # First a step that waits for no other rank: a dead rank is noticed in its collective,
        # while rank 0 in ``outcome`` would wait for that rank's note.
        on_every_rank(what, background.own_part)
        on_every_rank(what, background.outcome)
    except CheckpointError:
        background.join()
        raise


def abandon_running_save() -> None:
    """Abandon the save that runs in the background, if any; called when ranks are lost.

    Nothing is sent. Returns when this rank's thread no longer writes.
    """
    global _running_save
    background, _running_save = _running_save, None
    if background is not None:
        background.give_up()


def _collect_and_compare(
    what: str, options: tuple[Any, ...], objects: dict[str, Any], begun: list[UnfinishedCheckpoint]
) -> tuple[Contents, UnfinishedCheckpoint, list[Note]]:
    """Collect what this rank saves, and compare it with the other ranks. A collective.

    Args:
        what: the save, for error messages.
        options: (folder, step, keep, wait) of ``save``.
        objects: the objects to save.
        begun: on rank 0, the new folder is added to this list as soon as it exists, so that the
            caller can remove it if this raises.

    Returns:
        This rank's contents, the folder that rank 0 has made, and each rank's note, a message that
        describes what it saves.
    """
    collected: list[Contents] = []

    def collect_and_create() -> tuple[Note, UnfinishedCheckpoint | None]:
        folder, step, keep, _ = options
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}, and the new one is kept: give 1 or more, or None.")
        collected.append(collect(objects))
        note = _planner.note_of(collected[0], options)
        if current().rank == 0:
            begun.append(folders.create_unfinished(folder, step))
        else:
            # This process may own the folder from an earlier world, in which it was rank 0.
            owner.release(folders.mark_of(folder))
        return note, begun[0] if begun else None

    results = on_every_rank(what, collect_and_create)
    notes = [note for note, _ in results]
    check_equal_contents(what, notes)
    _planner.exchange_pieces(what, collected[0], notes)
    checkpoint = results[0][1]
    assert checkpoint is not None
    return collected[0], checkpoint, notes


def _make_job(
    contents: Contents,
    tensors: dict[str, torch.Tensor],
    checkpoint: UnfinishedCheckpoint,
    step: int | None,
    keep: int | None,
    plan: SaveDivision,
) -> SaveJob:
    pieces = [(i.index, _name_in_file(i), data_of(i, tensors)) for i in plan.own_pieces]
    transport = current()
    return SaveJob(
        checkpoint, transport.rank, transport.size, step, keep, plan.tensors, pieces,
        contents.values, contents.kinds, contents.aliases, plan.differing,
    )  # fmt: skip


def _to_saved_layout(x: Any) -> torch.Tensor:
    """Return ``x`` in the layout in which it is saved, where each shard is one box of the tensor.

    Partial axes become B, and cuts such as ``S(0, cut="zigzag")`` become the plain ``S(0)``.
    """
    if is_global(x) and x._spec.settled.plain is not x._spec:
        return x.detach().to_global(sbp=x._spec.settled.plain.sbp)
    return x


def _name_in_file(item: Any) -> str:
    """Return the name in the data file of a piece, given as an item of torch's save plan.

    A piece that is a whole tensor has the tensor's name, ``weight``. A part of a tensor is named as
    a slice of it: ``weight[0:4, 0:8]``.
    """
    data = item.tensor_data
    start, size = data.chunk.offsets, data.chunk.sizes
    if tuple(size) == tuple(data.size):
        return item.index.fqn
    return f"{item.index.fqn}[{', '.join(f'{a}:{a + n}' for a, n in zip(start, size))}]"  # noqa: B905


def _write_now(what: str, job: Callable[[], SaveJob]) -> None:
    jobs: list[SaveJob] = []

    def write() -> Part:
        jobs.append(job())
        return write_part(jobs[0])

    parts = on_every_rank(what, write)
    from_rank_0(what, lambda: complete(jobs[0], parts))


def _write_later(checkpoint: UnfinishedCheckpoint, job: Callable[[], SaveJob]) -> None:
    global _running_save

    def job_of_copies() -> SaveJob:
        # The thread writes copies, because training changes the tensors meanwhile.
        save_job = job()
        copies = _copies.copy([x for _, _, x in save_job.own_pieces])
        save_job.own_pieces = [
            (index, name, x)
            for (index, name, _), x in zip(save_job.own_pieces, copies, strict=True)
        ]
        return save_job

    # Kept before anything can fail on this rank alone: all ranks ask for its outcome.
    _running_save = BackgroundSave(checkpoint)
    _running_save.start(job_of_copies)
