"""Folders of checkpoints: their names, and how a checkpoint appears whole or not at all.

```
run/.saving-3f2a-step-00000120/  rank-00000.safetensors  rank-00001.safetensors    being written
run/step-00000120/               the same files and checkpoint.json                whole: one rename
```

Only rank 0 creates, renames and removes folders, and only in a folder that its job owns
(``owner.py``).
"""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from dataclasses import dataclass

from ..files import index as index_file
from . import owner

_SAVING, _DELETING, _MARK = ".saving-", ".deleting-", ".in-use"


@dataclass(frozen=True)
class UnfinishedCheckpoint:
    """Paths of a checkpoint that is being written into ``root``, the folder of all checkpoints.

    Its final name is ``name``, and ``serial`` its number among the saves into ``root``. Until it is
    complete its name has a random part, ``random_part``, so that a rank that was suspended for long
    cannot write into the folder of another job.
    """

    root: str
    name: str
    serial: int
    random_part: str

    @property
    def path(self) -> str:
        """Path of the checkpoint once it is finished."""
        return os.path.join(self.root, self.name)

    @property
    def temporary_path(self) -> str:
        """Path of the checkpoint while it is being written."""
        return os.path.join(self.root, f"{_SAVING}{self.random_part}-{self.name}")

    @property
    def mark(self) -> str:
        """Path of the mark, the file that says which job owns ``root``."""
        return mark_of(self.root)

    def file(self, name: str) -> str:
        """Return the path of the checkpoint's file ``name`` while it is being written."""
        return os.path.join(self.temporary_path, name)


def mark_of(root: str) -> str:
    """Return the path of the mark, the file that says which job owns the folder ``root``."""
    return os.path.join(root, _MARK)


def create_unfinished(root: str, step: int | None) -> UnfinishedCheckpoint:
    """Create the folder to write a checkpoint into, and remove what killed saves have left.

    Rank 0 calls it. ``root`` is the folder of all checkpoints of the run; ``step`` is as in
    ``save``.

    Raises:
        CheckpointError: another job saves into ``root``.
    """
    os.makedirs(root, exist_ok=True)
    owner.claim(mark_of(root))
    try:
        return _create_unfinished(root, step)
    except BaseException:
        owner.release(mark_of(root), unless_kept=True)
        raise


def _create_unfinished(root: str, step: int | None) -> UnfinishedCheckpoint:
    for name in os.listdir(root):
        # This job owns ``root`` by now, so unfinished folders in it belong to no living job.
        if name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    serial = max((number for number, _ in _complete_checkpoints(root)), default=0) + 1
    name = f"save-{serial:08}" if step is None else f"step-{step:08}"
    if os.path.exists(os.path.join(root, name)):  # saved before, perhaps by an earlier run
        name += f"-again-{serial}"
    checkpoint = UnfinishedCheckpoint(root, name, serial, uuid.uuid4().hex[:4])
    os.mkdir(checkpoint.temporary_path)
    return checkpoint


def finish(checkpoint: UnfinishedCheckpoint, keep: int | None) -> None:
    """Give a written checkpoint its final name, and remove all but the last ``keep`` checkpoints.

    None keeps all. Raises CheckpointError if another job has taken over the folder.
    """
    # The entries of the folder reach the disk before the name that declares it complete.
    sync(checkpoint.temporary_path)
    # If this process was suspended, another job may have taken over the folder meanwhile.
    owner.check(checkpoint.mark)
    os.rename(checkpoint.temporary_path, checkpoint.path)
    sync(checkpoint.root)
    for _, name in _complete_checkpoints(checkpoint.root)[: -keep if keep else 0]:
        deleted_path = os.path.join(checkpoint.root, _DELETING + name)
        try:
            # Renamed first, so that nobody sees a checkpoint of which a part is removed.
            os.rename(os.path.join(checkpoint.root, name), deleted_path)
        except OSError as error:  # the new one is saved, and the next save tries again
            warnings.warn(f"checkpoint.save: {name!r} is kept for now: {error}", stacklevel=2)
            return
        shutil.rmtree(deleted_path, ignore_errors=True)


def give_up(checkpoint: UnfinishedCheckpoint) -> None:
    """Remove the files of a checkpoint that will not be completed.

    Other jobs may save into ``checkpoint.root`` again, unless this job has saved a checkpoint
    there.
    """
    shutil.rmtree(checkpoint.temporary_path, ignore_errors=True)
    owner.release(checkpoint.mark, unless_kept=True)


def latest_in(root: str) -> str | None:
    """Return the path of the checkpoint in ``root`` that was saved last; None if there is none.

    The order is that of saving, not of steps.
    """
    checkpoints = _complete_checkpoints(root)
    return os.path.join(root, checkpoints[-1][1]) if checkpoints else None


def _complete_checkpoints(root: str) -> list[tuple[int, str]]:
    """Return (serial number, name) of all complete checkpoints in ``root``, oldest first."""
    checkpoints = []
    for name in os.listdir(root) if os.path.isdir(root) else []:
        if not name.startswith("."):
            serial = index_file.serial_of(os.path.join(root, name, index_file.NAME))
            if serial is not None:
                checkpoints.append((serial, name))
    return sorted(checkpoints)


def sync(folder: str) -> None:
    """Wait until the directory entries of ``folder`` are on disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
