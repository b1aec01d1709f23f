"""Which way a move goes, by its size and dtype: a table measured once for a machine and kept.

The file lies in the user's cache folder, one for each device, number of ranks and version of torch.
Ways differ in time, and in the order in which gloo and NCCL add up floats.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

NARROW = frozenset((torch.float16, torch.bfloat16))  # they cost more to add than to move


@dataclass(frozen=True)
class Table:
    """Sizes in bytes of the logical tensor.

    Args:
        one_shot: all-reduces up to this size send all to all; longer ones are reduced in parts.
        one_shot_narrow: the same for floats of two bytes.
        messages_above: moves ("all_reduce", "all_reduce narrow", ...) that the transport below
            does faster above this size. Those not named never are.
    """

    one_shot: int = 64 * 1024
    one_shot_narrow: int = 32 * 1024
    messages_above: dict[str, int] = field(default_factory=dict)

    def by_messages(self, move: str, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether the transport below does the move."""
        above = self.messages_above.get(row(move, dtype))
        return above is not None and nbytes > above


def row(move: str, dtype: torch.dtype) -> str:
    """The name of a move for a dtype."""
    return move + " narrow" if dtype in NARROW else move


def processors() -> str:
    """The device of ranks that share the host's memory."""
    return f"{os.cpu_count()} processors"


def path(ranks: int, device: str) -> Path:
    """Where the table for so many ranks on such devices is kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"transports {device} {ranks} ranks torch {torch.__version__}.json"
    return Path(folder) / "consistent" / "-".join(name.replace("/", " ").split())


def load(ranks: int, device: str) -> Table | None:
    """The kept table; the built-in one where none can be kept; None where it is to be measured."""
    file = path(ranks, device)
    try:
        return Table(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        pass
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
        pass  # measured again at the next start
