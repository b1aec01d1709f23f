"""No file that somebody made up crashes, stops or fills the process that reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from consistent import checkpoint
from tests.consistent.checkpoint import hostile

KINDS = {
    "safetensors": hostile.SAFETENSORS,
    "weight maps": hostile.WEIGHT_MAPS,
    "our index": hostile.INDEXES,
    "torch.distributed.checkpoint": hostile.DCP,
    "torch.save": hostile.TORCH,
}
FITS = {"names of names"}  # as they are, and small: they may be read


def _load(path: Path) -> None:
    checkpoint.load(path)


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_made_up_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    paths = []
    for number, (_, write) in enumerate(KINDS[kind].items()):
        write(tmp_path / str(number))
        paths.append(next(tmp_path.glob(f"{number}*")))
    found = hostile.read_all(_load, paths, most_mib=2048)
    assert len(found) == len(paths), f"the child ended at {list(KINDS[kind])[len(found)]!r}"
    wrong = {}
    for name, path, told in zip(KINDS[kind], paths, found, strict=True):
        refused = told["said"] and told["said"][0] == "CheckpointError"
        small = told["grown"] <= 10 * size_of(path) + (40 << 20)
        one_sentence = len(told["said"][1] if told["said"] else "") < 700
        if not ((refused or name in FITS) and small and one_sentence and told["seconds"] < 20):
            wrong[name] = {**told, "size": size_of(path), "said": str(told["said"])[:300]}
    assert not wrong, "\n".join(f"{name}: {told}" for name, told in wrong.items())


@pytest.mark.parametrize("name", ["checkpoint.json", ".metadata", "x.safetensors", "x.pt"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:

    os.mkfifo(tmp_path / name)
    path = tmp_path if name in ("checkpoint.json", ".metadata") else tmp_path / name
    (told,) = hostile.read_all(_load, [path], most_mib=2048)
    assert told["said"][0] in ("CheckpointError", "FileNotFoundError"), told
    assert told["seconds"] < 5
