"""Ranks that do not see the same folders, and children of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import consistent
from consistent import B, Placement, S, checkpoint
from consistent.checkpoint import CheckpointError
from tests.ranks import on_ranks


@contextlib.contextmanager
def _apart(rank: int, folder: Path) -> Iterator[None]:
    """Each rank is in a folder of its own, as on a host of its own: one path, two file systems."""
    before = os.getcwd()
    own = folder / f"host{rank}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        yield
    finally:
        os.chdir(before)


def _split() -> Any:
    return consistent.distribute(torch.arange(8.0), Placement.all("cpu"), S(0))


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_a_save_into_folders_that_are_not_shared(rank: int, tmp_path: Path, wait: bool) -> None:
    with _apart(rank, tmp_path):
        said = "rank 1: OSError: .*host1.*which rank 0 has made, is not there on .*ranks share"
        with pytest.raises(CheckpointError, match=said):
            checkpoint.save("run", x=_split(), wait=wait)
            checkpoint.wait()
        assert not os.path.exists("run") or os.listdir("run") == []


@on_ranks(2)
def test_a_load_of_folders_that_are_not_shared(rank: int, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "shared", x=_split(), random=False)
    with _apart(rank, tmp_path):
        if rank == 0:
            os.symlink(path, "run")
        with pytest.raises(CheckpointError, match="rank 1: .*host1.run, which rank 0 sees, is not"):
            checkpoint.load("run", x=_split())
    again = checkpoint.save(tmp_path / "shared", x=_split() + 1, random=False)
    with _apart(rank, tmp_path):
        if rank == 1:
            os.symlink(again, "run")
        with pytest.raises(CheckpointError, match="rank 1 and rank 0 see different checkpoints"):
            checkpoint.load("run", x=_split())
    with _apart(rank, tmp_path):
        os.remove("run")
        torch.save({"x": torch.ones(8 + rank)}, "run")
        with pytest.raises(CheckpointError, match="different checkpoints|does not fit"):
            checkpoint.load("run", x=torch.ones(8 + rank))
        torch.save({"x": torch.ones(8)}, "run")  # a copy on each host is as good as one
        x = torch.zeros(8)
        checkpoint.load("run", x=x)
        assert x.sum() == 8


def _in_child(step: Any) -> str:
    """What ``step`` raises in a forked child, as in the worker of a DataLoader; "" if nothing."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        try:
            step()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(tell, said.encode()[:4000])
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


@on_ranks(1, 2)
def test_a_forked_child_reads_alone_and_calls_no_collective(rank: int, tmp_path: Path) -> None:
    x = _split()
    checkpoint.save(tmp_path / "run", x=x, random=False)
    torch.save(x, tmp_path / f"{rank}.pt")
    checkpoint.save_full(torch.nn.ParameterDict({"x": x.to_global(sbp=B)}), tmp_path / "x.pt")
    alone = consistent.Placement.all("cpu").size == 1
    of_all = {
        "load": lambda: checkpoint.load(tmp_path / "run", x=_split()),
        "save": lambda: checkpoint.save(tmp_path / "run", x=x),
        "save elsewhere": lambda: checkpoint.save(tmp_path / f"of{rank}", x=x),
    }
    said = {name: _in_child(step) for name, step in of_all.items()}
    for name in ("load", "save elsewhere"):
        assert (said[name] == "") if alone else "is a child of rank" in said[name], said
    assert ("another job saves there" if alone else "is a child of rank") in said["save"], said
    assert _in_child(lambda: torch.load(tmp_path / f"{rank}.pt")) == ""
    assert _in_child(lambda: torch.load(tmp_path / "x.pt", weights_only=True)) == ""
    checkpoint.save(tmp_path / "run", x=x, random=False)  # the parent goes on
    checkpoint.load(tmp_path / "run", x=x)
