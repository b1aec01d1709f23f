"""All that writes files, on a disk that fails at its n-th call, for each n until nothing fails.

Run by ``test_full_disks.py`` on two ranks, under ``faulty_disk.c``: ``writers.py FOLDER FAULTS``.
Rank 0 prints what went wrong, a line each, and how many failures each writer met.

Version v of what is saved is told by what is read. After each failure the version before, or the
new one, is there and whole; of a writer that all ranks call, all raise the same, or none does.
"""

from __future__ import annotations

import ctypes
import errno
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import consistent
import mirrored
from consistent import S, checkpoint, flow
from consistent.auto.machines.files import to_text
from consistent.auto.machines.known import KNOWN
from consistent.auto.machines.machine import Machine
from consistent.drawing import files
from consistent.nn.plan import Plan
from consistent.visualize.visualize import visualize
from mirrored.transports.tuning import own_files

STAYS, SHORT = 1, 2
FAULTS = {
    "full": (errno.ENOSPC, STAYS),
    "full in the middle of a write": (errno.ENOSPC, SHORT),
    "one error": (errno.EIO, 0),
    "full for a moment": (errno.ENOSPC, 0),
    "dead": (errno.EIO, STAYS),
    "read-only": (errno.EROFS, STAYS),
    "over the quota": (errno.EDQUOT, STAYS | SHORT),
}
MOST_CALLS = 200

AT = consistent.Placement.all("cpu")
RANKS = tuple(range(mirrored.current().size))
MODEL: Any = consistent.parallelize(
    torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)), AT, {"*weight": S(0)},
    verbose=False,
)  # fmt: skip


@dataclass(frozen=True)
class Writer:
    """How version v is written into a folder, and which one lies there."""

    write: Callable[[str, int], object]
    read: Callable[[str], int]
    together: bool = False  # all ranks call it


def fill(value: float) -> None:
    with torch.no_grad():
        for weight in MODEL.parameters():
            weight.fill_(value)


def version() -> int:
    """What all weights are filled with."""
    (found,) = {float(x) for weight in MODEL.parameters() for x in weight.full().flatten()}
    return int(found)


def save(folder: str, v: int, wait: bool = True) -> None:
    fill(v)
    checkpoint.save(folder, model=MODEL, step=v, keep=2, wait=wait)
    checkpoint.wait()


def saved(folder: str) -> int:
    fill(-1)
    step = checkpoint.load(folder, model=MODEL)["step"]
    assert step == version()
    return step


def whole(name: str) -> Writer:
    def write(folder: str, v: int) -> None:
        fill(v)
        checkpoint.save_full(MODEL, f"{folder}/{name}")

    def read(folder: str) -> int:
        fill(-1)
        checkpoint.load(f"{folder}/{name}", model=MODEL)
        return version()

    return Writer(write, read, together=True)


def of_bytes(
    write: Callable[[str, int], object], of: Callable[[int], bytes], suffix: str = ""
) -> Writer:
    """A writer of one file whose version v is known to the byte."""

    def read(folder: str) -> int:
        others = {path.suffix for path in Path(folder).iterdir()} - {suffix}
        assert others <= ({".part"} if DISK.keeps_all else set())
        found = Path(folder, f"file{suffix}").read_bytes()
        return next(v for v in range(MOST_CALLS) if of(v) == found)

    return Writer(lambda folder, v: write(f"{folder}/file", v), read)


def variables(folder: str, v: int) -> None:
    """Into a folder of its own for each version, since one that holds variables is refused."""
    flow.clear_default_session()
    for name in "abc":
        flow.get_variable(name, (3,), initializer=flow.constant_initializer(float(v)))
    flow.train.CheckPoint().save(f"{folder}/{v}")


def last_variables(folder: str) -> int:
    """Where a dead disk removes nothing, some variables may be left, which ``load`` refuses."""
    found = {
        int(each.name): {path.stem: torch.load(path).tolist() for path in each.glob("*.pt")}
        for each in Path(folder).iterdir()
    }
    assert all(left == [v] * 3 for v, each in found.items() for left in each.values())
    return max(v for v, each in found.items() if len(each) == 3)


def machine(v: int) -> Machine:
    return replace(next(iter(KNOWN.values())), name=f"machine {v}")


def plan(v: int) -> Plan:
    return Plan({f"layer{k}.weight": (S(0),) for k in range(v + 2)}, notes=[f"version {v}"])


def picture(v: int) -> Any:
    return visualize(consistent.TensorSpec.of(AT, S(0), (v + 4, 8), torch.float32))


def table(v: int) -> bytes:
    return b"%d" % v * 100


WRITERS = {
    "checkpoint.save": Writer(save, saved, together=True),
    "checkpoint.save(wait=False)": Writer(lambda f, v: save(f, v, False), saved, together=True),
    "save_full of safetensors": whole("m.safetensors"),
    "save_full of torch": whole("m.pt"),
    "flow's CheckPoint.save": Writer(variables, last_variables, together=True),
    "Plan.save": of_bytes(lambda path, v: plan(v).save(path), lambda v: plan(v).yaml().encode()),
    "Machine.save": of_bytes(
        lambda path, v: machine(v).save(path), lambda v: to_text(machine(v)).encode()
    ),
    "Picture.save": of_bytes(
        lambda path, v: picture(v).save(f"{path}.svg"), lambda v: picture(v).svg().encode(), ".svg"
    ),
    "pages": of_bytes(lambda path, v: files.write(path, table(v).decode()), table),
    "tables of the cache": of_bytes(lambda path, v: own_files.write(Path(path), table(v)), table),
}


class Disk:
    """The disk of this rank."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.disk_failed.restype = ctypes.c_char_p
        self.keeps_all = False

    def fail_at(self, folder: str, n: int, error: int, ways: int) -> None:
        self.keeps_all = ways != 0 and (error, ways) != FAULTS["full"]  # removals fail as well
        self._library.disk_fail_at(folder.encode(), n, error, ways)

    def heal(self) -> str:
        """Fail no more; returns the call that failed first, or ""."""
        failed = self._library.disk_failed()
        self._library.disk_fail_at(b"", 0, 0, 0)
        return failed.decode() if failed else ""


DISK = Disk()


def attempt(writer: Writer, folder: str, v: int) -> tuple[str, str]:
    """The kind of error, and its text; "" of none."""
    try:
        writer.write(folder, v)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def told(value: Any, together: bool) -> list[Any]:
    return mirrored.current().gather_objects(value, RANKS) if together else [value]


def failures(writer: Writer, folder: str, failing: int, fault: tuple[int, int]) -> tuple[int, list]:
    """How many calls failed on rank ``failing``, and what went wrong."""
    attempt(writer, folder, 1)
    there, wrong = writer.read(folder), []
    rank = mirrored.current().rank
    for n in range(1, MOST_CALLS):
        v = n + 1
        if rank == failing:
            DISK.fail_at(folder, n, *fault)
        said = attempt(writer, folder, v)
        outcomes = told((said, DISK.heal()), writer.together)
        met = outcomes[failing if writer.together else 0][1]
        ends = {each for each, _ in outcomes}
        try:
            found = writer.read(folder)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        right = found in ((v,) if not said[0] else (there, v))
        clear = said[0] in ("", "CheckpointError", "OSError") and len(ends) == 1
        if not (right and clear):
            wrong.append(f"call {n}, {met}: {ends}, and {found} is there")
        if not met:
            return n - 1, wrong
        there = found
    return MOST_CALLS, [*wrong, "it fails for ever"]


def main(root: str, faults: Sequence[str]) -> None:
    rank, counts, wrong = mirrored.current().rank, Counter[str](), []
    for name, writer in WRITERS.items():
        for fault in faults:
            for failing in RANKS if writer.together else (0,):
                folder = Path(root, f"{name}-{fault}-{failing}".replace("/", " "))
                if rank == 0:
                    folder.mkdir()
                told(None, True)
                if writer.together or rank == 0:
                    number, found = failures(writer, str(folder), failing, FAULTS[fault])
                    counts[name] += number
                    wrong += [f"{name}, {fault}, rank {failing}: {each}" for each in found]
    if rank == 0:
        print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2:] or list(FAULTS))
