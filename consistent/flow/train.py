"""``flow.train``: saving variables to files and loading them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import torch

from mirrored import whole_files
from mirrored.every_rank import agree
from mirrored.transports.default import current

from . import session


class CheckPoint:
    """Object that initializes, saves and loads all variables of the program.

    Each variable is saved whole, in a file of its own, so that a program on other devices can load
    it.
    """

    def init(self) -> None:
        """Reset every variable to its initial values, also variables that are made later."""
        session.loaded.clear()
        for variable in session.variables.values():
            variable.initialize()

    def save(self, path: str | os.PathLike) -> None:
        """Write all variables into a folder, which must not contain saved variables.

        This is a collective; one rank writes.
        """
        folder, writes = Path(path), current().rank == 0
        fault = ""
        if writes and list(folder.glob("*.pt")):
            fault = f"{folder} holds variables already; name another folder"
        _raise_on_every_rank("save", fault)
        written_files: list[Path] = []
        for name, variable in session.variables.items():
            # A collective: every rank gathers, although one writes, even after a failed write.
            value = variable.value.full()
            if writes and not fault:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    with whole_files.replace_atomically(_variable_file(folder, name)) as file:
                        torch.save(value.cpu(), file)
                    written_files.append(_variable_file(folder, name))
                except Exception as error:  # torch raises errors of its own for a full disk
                    fault = f"{type(error).__name__}: {error}"
        for path in written_files if fault else ():  # a partial checkpoint would look complete
            with suppress(OSError):
                path.unlink()
        _raise_on_every_rank("save", fault)

    def load(self, path: str | os.PathLike) -> None:
        """Load all variables from a folder.

        Variables that are created later load their values from it when they are created.
        """
        files = {unquote(file.stem): file for file in sorted(Path(path).glob("*.pt"))}
        missing = sorted(set(session.variables) - set(files))
        fault = f"{path} holds no variables" if not files else ""
        if files and missing:
            fault = f"{path} holds {sorted(files)}, and the program has {missing[0]!r} too"
        _raise_on_every_rank("load", fault)
        # After the agreement, so that a fault changes no variable on any rank.
        session.loaded.clear()
        session.loaded.update(files)
        for name, variable in session.variables.items():
            variable.load(torch.load(files[name], weights_only=True, mmap=True))


def _variable_file(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='')}.pt"


def _raise_on_every_rank(what: str, fault: str) -> None:
    """Wait for all ranks, and raise OSError on every rank if any rank has a fault. A collective.

    ``fault`` describes what went wrong on this rank; "" if nothing did. ``what`` names the calling
    method, for the message.
    """

    def make_error(faults: list[str]) -> OSError:
        rank, text = next((rank, text) for rank, text in enumerate(faults) if text)
        return OSError(f"CheckPoint.{what}: on rank {rank}: {text}.")

    agree(fault, make_error, fits=lambda faults: not any(faults))
