"""The table that decides, by size and dtype, which way a move goes. It is measured once and kept.

There is one file for each device, number of ranks and version of torch, in the user's cache folder.
The ways differ in time, and in the order in which gloo and NCCL add up floats.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from ...comm import Link

NARROW = frozenset((torch.float16, torch.bfloat16))  # adding them costs more than moving them


@dataclass(frozen=True)
class Table:
    """Sizes in bytes of the logical tensor.

    Args:
        one_shot: in all-reduces up to this size all send everything to all; longer ones are reduced
            in parts.
        one_shot_narrow: the same for floats of two bytes.
        messages_above: move ("all_reduce", "all_reduce narrow", ...) -> the size above which the
            transport below does it faster. A move that is not named never goes there.
        latency_s: seconds that the smallest all-reduce takes.
        bytes_per_s: bytes that a rank sends in a second when large tensors are joined.
        copy_start_s: seconds that the smallest copy on one rank takes; None if it was not measured.
        copy_bytes_per_s: bytes that a rank copies in a second while all ranks copy large tensors.
    """

    one_shot: int = 64 * 1024
    one_shot_narrow: int = 32 * 1024
    messages_above: dict[str, int] = field(default_factory=dict)
    latency_s: float = 4e-6
    bytes_per_s: float = 4e9
    copy_start_s: float | None = None
    copy_bytes_per_s: float | None = None

    @property
    def link(self) -> Link:
        """What messages and copies cost, by which plans are chosen."""
        return Link(self.latency_s, self.bytes_per_s, self.copy_start_s, self.copy_bytes_per_s)

    def by_messages(self, move: str, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether the transport below does the move."""
        above = self.messages_above.get(row(move, dtype))
        return above is not None and nbytes > above


def row(move: str, dtype: torch.dtype) -> str:
    """The name of a move for a dtype."""
    return move + " narrow" if dtype in NARROW else move


def processors() -> str:
    """The name, in tables, of the device of ranks that share the host's memory."""
    return f"{os.cpu_count()} processors"


def path(ranks: int, device: str) -> Path:
    """The file of the table for so many ranks on such devices."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"transports {device} {ranks} ranks torch {torch.__version__}.json"
    return Path(folder) / "consistent" / "-".join(name.replace("/", " ").split())


def load(ranks: int, device: str) -> Table | None:
    """The kept table; the built-in one if none can be kept; None if it has yet to be measured."""
    file = path(ranks, device)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        kept = json.loads(file.read_text())
        if kept.keys() == {each.name for each in fields(Table)}:
            return Table(**kept)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Table()
    return None if os.access(file.parent, os.W_OK) else Table()


def save(table: Table, ranks: int, device: str) -> None:
    """Keep `table`; another process that reads meanwhile sees the old one or the new one."""
    file = path(ranks, device)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(table), indent=1) + "\n")
        part.replace(file)
    except OSError:
        pass  # the next start measures it again
