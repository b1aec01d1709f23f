"""Table of measured timings that selects, by size and dtype, how a collective is sent.

There is one file for each device, number of ranks and version of torch, in the user's cache folder,
and one more for each number of ranks that share no memory, which only has the cost of messages
(``between.py``). The two ways, shared memory and messages, differ in time, and in an all-reduce on
GPUs also in the order in which floats are summed, since NCCL has its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...comm import Link
from ...readable import escape_invisible
from . import own_files

MESSAGES = "messages"  # stands for the device in the table of ranks that share no memory
# What is measured, by the names of a transport's methods.
MOVES = (
    "all_reduce", "reduce_scatter", "all_gather_into_tensor", "all_to_all_single", "broadcast",
)  # fmt: skip
NARROW = frozenset((torch.float16, torch.bfloat16))  # adding them costs more than moving them


@dataclass(frozen=True)
class Table:
    """Sizes from which a collective is sent in another way, and measured costs.

    Sizes are bytes of the logical tensor.

    Args:
        one_shot: up to this size every rank sends its whole tensor to all others in an all-reduce;
            a larger one is a reduce-scatter and an all-gather.
        one_shot_narrow: the same limit for float16 and bfloat16.
        messages_above: collective ("all_reduce", "all_reduce narrow", ...) -> the size above which
            messages are faster. A collective that is not listed is never sent as messages.
        latency_s: seconds that the smallest all-reduce takes.
        bytes_per_s: bytes that a rank sends in a second in an all-gather of large tensors.
        copy_start_s: seconds that the smallest copy on one rank takes; None if it was not measured.
        copy_bytes_per_s: bytes that a rank copies in a second while all ranks copy large tensors.
        hosts: hash of the hosts between which messages were measured; "" for any.
    """

    one_shot: int = 64 * 1024
    one_shot_narrow: int = 32 * 1024
    messages_above: dict[str, int] = field(default_factory=dict)
    latency_s: float = 4e-6
    bytes_per_s: float = 4e9
    copy_start_s: float | None = None
    copy_bytes_per_s: float | None = None
    hosts: str = ""

    @property
    def link(self) -> Link:
        """The measured cost of messages and copies, in the form that ``Transport.link`` returns."""
        return Link(self.latency_s, self.bytes_per_s, self.copy_start_s, self.copy_bytes_per_s)

    def by_messages(self, move: str, dtype: torch.dtype, nbytes: int) -> bool:
        """Return whether messages are faster than shared memory for a collective.

        ``move`` is its name, ``nbytes`` the size of the logical tensor.
        """
        above = self.messages_above.get(row_key(move, dtype))
        return above is not None and nbytes > above


def row_key(move: str, dtype: torch.dtype) -> str:
    """Return the key in ``messages_above`` of the collective ``move`` for a dtype.

    It is ``"all_reduce"`` for float32 and ``"all_reduce narrow"`` for bfloat16.
    """
    return move + " narrow" if dtype in NARROW else move


def cpu_device_name() -> str:
    """Return the device name under which tables for CPU tensors are stored: "16 processors"."""
    return f"{os.cpu_count()} processors"


def path(ranks: int, device: str) -> Path:
    """Return the file of the table for ``ranks`` ranks on devices called ``device``."""
    name = f"transports {device} {ranks} ranks torch {torch.__version__}.json"
    return own_files.folder() / "-".join(name.replace("/", " ").split())


def load_stored(ranks: int, device: str) -> Table | None:
    """Return the table stored for ``ranks`` ranks on devices called ``device``, or None."""
    return _parse_table(own_files.read(path(ranks, device)))


def load(ranks: int, device: str) -> Table | None:
    """Return the table for ``ranks`` ranks on devices called ``device``; None: measure it first.

    It is the stored table. If none can be stored, it is the built-in table, because measuring at
    each start would be slow.
    """
    stored_table, file = load_stored(ranks, device), path(ranks, device)
    if stored_table is not None:
        return stored_table
    # Another user's file in that place cannot be replaced, and measuring at each start is slow.
    may_measure = own_files.can_write(file) and (
        not os.path.lexists(file) or _is_owned_by_user(file)
    )
    if not may_measure and (foreign_path := own_files.foreign_path(file)) is not None:
        _warn_foreign_path(escape_invisible(str(foreign_path)))
    return None if may_measure else Table()


@lru_cache(maxsize=8)
def _warn_foreign_path(foreign_path: str) -> None:
    """Warn, once in a process, that another user's file or folder is in the way."""
    warnings.warn(
        f"{foreign_path} is another user's, or others may write in it.\n"
        "  What was measured of messages between ranks is neither read nor kept there, and times "
        "that are built in are used.\n"
        "  Set XDG_CACHE_HOME to a folder of your own, or `chmod o-w` it.",
        stacklevel=4,
    )


def _is_owned_by_user(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.lstat(file).st_uid == os.geteuid()
    return False


def _parse_table(text: bytes | None) -> Table | None:
    """Parse the content of a file as a table; return None if it is anything else."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        values = json.loads(text or b"")
        # A file of another version of this library has other fields or names: measured again.
        if values.keys() == {each.name for each in fields(Table)} and _has_valid_values(values):
            return Table(**values)
    return None


def _has_valid_values(values: dict[str, Any]) -> bool:
    sizes = [values["one_shot"], values["one_shot_narrow"], *values["messages_above"].values()]
    seconds = [values["latency_s"], values["bytes_per_s"]]
    seconds += [x for x in (values["copy_start_s"], values["copy_bytes_per_s"]) if x is not None]
    return (
        # `type(n) is int`: isinstance would accept a bool.
        all(type(n) is int and n >= 0 for n in sizes)
        and all(type(x) in (int, float) and 0 < x < math.inf for x in seconds)
        and isinstance(values["hosts"], str)
        and all(name.removesuffix(" narrow") in MOVES for name in values["messages_above"])
    )


def save(table: Table, ranks: int, device: str) -> None:
    """Store ``table`` atomically; a concurrent reader sees the old file or the new one."""
    with contextlib.suppress(OSError):  # the next start measures it again
        own_files.write(path(ranks, device), f"{json.dumps(asdict(table), indent=1)}\n".encode())
