"""Folders of checkpoints: their names, which is the latest, and how one appears whole or not at all.

```
run/.saving-3f2a-step-00000120/  rank-00000.safetensors  rank-00001.safetensors    being written
run/step-00000120/               the same files and checkpoint.json                whole: one rename
```

Only rank 0 makes, renames and removes folders, and only of a job that owns them (``owner.py``).
"""  # noqa: E501

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
class Begun:
    """A checkpoint that is being written: all of them in ``root``, and where this one goes.

    ``own``: what no other save has in the name of its folder, so that a rank that was stopped
    meanwhile writes nothing into another job's.
    """

    root: str
    name: str
    serial: int
    own: str

    @property
    def path(self) -> str:
        """Where it will be."""
        return os.path.join(self.root, self.name)

    @property
    def unfinished(self) -> str:
        """Where it is being written."""
        return os.path.join(self.root, f"{_SAVING}{self.own}-{self.name}")

    @property
    def mark(self) -> str:
        """The file that says whose ``root`` is."""
        return mark_of(self.root)

    def file(self, name: str) -> str:
        """The path of one of its files while it is being written."""
        return os.path.join(self.unfinished, name)


def mark_of(root: str) -> str:
    """The file that says which job owns the folder."""
    return os.path.join(root, _MARK)


def begin(root: str, step: int | None) -> Begun:
    """Make the folder to write in; what saves that were killed have left is removed.

    Raises:
        CheckpointError: another job saves into ``root``.
    """
    os.makedirs(root, exist_ok=True)
    owner.claim(mark_of(root))
    try:
        return _begun(root, step)
    except BaseException:
        owner.release(mark_of(root), unless_kept=True)
        raise


def _begun(root: str, step: int | None) -> Begun:
    for name in os.listdir(root):
        if name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    serial = max((number for number, _ in _whole(root)), default=0) + 1
    name = f"save-{serial:08}" if step is None else f"step-{step:08}"
    if os.path.exists(os.path.join(root, name)):  # saved before, perhaps by an earlier run
        name += f"-again-{serial}"
    begun = Begun(root, name, serial, uuid.uuid4().hex[:4])
    os.mkdir(begun.unfinished)
    return begun


def finish(begun: Begun, keep: int | None) -> None:
    """Give a written checkpoint its name, and remove all but the last ``keep``."""
    sync(begun.unfinished)
    owner.check(begun.mark)
    os.rename(begun.unfinished, begun.path)
    sync(begun.root)
    for _, name in _whole(begun.root)[: -keep if keep else 0]:
        doomed = os.path.join(begun.root, _DELETING + name)
        try:
            os.rename(os.path.join(begun.root, name), doomed)  # so that no half of it is seen
        except OSError as error:  # the new one is saved, and the next save tries again
            warnings.warn(f"checkpoint.save: {name!r} is kept for now: {error}", stacklevel=2)
            return
        shutil.rmtree(doomed, ignore_errors=True)


def give_up(begun: Begun) -> None:
    """Remove what was written of a checkpoint that will not be whole."""
    shutil.rmtree(begun.unfinished, ignore_errors=True)
    owner.release(begun.mark, unless_kept=True)


def latest_in(root: str) -> str | None:
    """The checkpoint in ``root`` that was saved last, in the order of saving, not of steps."""
    whole = _whole(root)
    return os.path.join(root, whole[-1][1]) if whole else None


def _whole(root: str) -> list[tuple[int, str]]:
    """(serial number, name) of all checkpoints in ``root``, the oldest first."""
    found = []
    for name in os.listdir(root) if os.path.isdir(root) else []:
        if not name.startswith("."):
            serial = index_file.serial_of(os.path.join(root, name, index_file.NAME))
            if serial is not None:
                found.append((serial, name))
    return sorted(found)


def sync(folder: str) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
