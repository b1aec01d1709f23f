"""What does not fit, or is damaged, is one clear error on every rank, and names what it is."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import sys
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S, checkpoint
from consistent.checkpoint import CheckpointError
from consistent.checkpoint.files import pieces
from tests.consistent.checkpoint.training import Training
from tests.ranks import on_ranks, pool


@on_ranks(2)
def test_nothing_there(rank: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / "run").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoint.load(tmp_path / "run")


@on_ranks(2, 3)
def test_another_model_names_every_tensor(rank: int, tmp_path: Path) -> None:
    placement = Placement.all("cpu")

    def model(**layers: nn.Module) -> Any:
        return consistent.parallelize(nn.ModuleDict(layers), placement, {"*": S(0)})

    saved = model(a=nn.Linear(4, 3), b=nn.Linear(3, 2), c=nn.Linear(2, 2), same=nn.Linear(2, 2))
    other = model(a=nn.Linear(5, 3), d=nn.Linear(3, 2), c=nn.Linear(2, 2).double(),
                  same=nn.Linear(2, 2))  # fmt: skip
    checkpoint.save(tmp_path, model=saved)
    before = [x.full() for x in other.state_dict().values()]
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(tmp_path, model=other, optimizer=torch.optim.SGD(other.parameters()))
    lines = str(raised.value).splitlines()
    for text in (
        "model: the checkpoint lacks d.weight", "model: the checkpoint lacks d.bias",
        "model: only the checkpoint has b.weight", "model: only the checkpoint has b.bias",
        "model.a.weight has shape (3, 5), and in the checkpoint (3, 4)",
        "model.c.weight is torch.float64, and in the checkpoint torch.float32; cast=True "
        "converts it",
        "optimizer: the checkpoint has none; it has model, random",
    ):  # fmt: skip
        assert any(text in line for line in lines), (text, lines)
    assert not any("same" in line for line in lines)
    for x, y in zip(other.state_dict().values(), before, strict=True):
        assert torch.equal(x.full(), y)
    other = model(a=nn.Linear(4, 3), d=nn.Linear(3, 2), c=nn.Linear(2, 2).double())
    checkpoint.load(tmp_path, model=other, strict=False, cast=True)
    assert torch.equal(other["c"].weight.full(), saved["c"].weight.full().double())


@on_ranks(2)
def test_another_optimizer(rank: int, tmp_path: Path) -> None:
    it = Training("rows")
    it.run(1)
    checkpoint.save(tmp_path, **it.objects)
    some = torch.optim.AdamW([it.model.first.weight, it.model.last.weight])
    with pytest.raises(CheckpointError, match=r"Only in the checkpoint: .*norm.weight.*"):
        checkpoint.load(tmp_path, model=it.model, optimizer=some)
    groups = torch.optim.AdamW([{"params": [p]} for p in it.model.parameters()])
    with pytest.raises(CheckpointError, match="same groups"):
        checkpoint.load(tmp_path, model=it.model, optimizer=groups)
    with pytest.raises(CheckpointError, match="in none of the modules"):
        checkpoint.save(tmp_path, model=nn.Linear(2, 2), optimizer=it.optimizer)
    with pytest.raises(CheckpointError, match="Give the same|same parameters, and give"):
        checkpoint.load(tmp_path, optimizer=it.optimizer)


@on_ranks(2)
def test_what_files_do_not_hold(rank: int, tmp_path: Path) -> None:
    for value, text in (
        ({"a": [threading.Lock()]}, "value.a.0 is a _thread.lock"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "on meta"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors"),
    ):
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path, value=value if rank else 1)  # one rank alone cannot
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path, value=value)
    with pytest.raises(CheckpointError, match="keep is 0"):
        checkpoint.save(tmp_path, value=1, keep=0)
    with pytest.raises(CheckpointError, match="different folder, step, keep and wait"):
        checkpoint.save(tmp_path, value=1, step=rank)
    with pytest.raises(CheckpointError, match="different names"):
        checkpoint.save(tmp_path, **{f"value{rank}": 1})
    assert rank or not list(tmp_path.iterdir())  # rank 0 cleans up


def _saved(folder: Path) -> Path:
    x = torch.arange(4.0 * pieces.BLOCK // 4).reshape(4, -1)  # sixteen megabytes in two pieces
    return Path(pool(2).run(_save_x, str(folder), x.shape)[0])


def _save_x(rank: int, folder: str, shape: Any) -> str:
    x = torch.arange(float(shape.numel())).reshape(shape)
    placement = Placement("cpu", [0, 1])
    return checkpoint.save(folder, x=consistent.distribute(x, placement, S(0)), random=False)


def _load_part(rank: int, folder: str, text: str | None) -> None:
    given = consistent.zeros(4, pieces.BLOCK // 4, placement=Placement("cpu", [0, 1]), sbp=S(0))
    if text is None:
        checkpoint.load(folder, x=given)
        return
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(folder, x=given)


def _damage(path: Path, at: int, data: bytes) -> bytes:
    with open(path, "r+b") as file:
        file.seek(at)
        before = file.read(len(data))
        file.seek(at)
        file.write(data)
    return before


def test_damage_to_the_files_is_found(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    file, index = folder / "rank-00001.safetensors", folder / "checkpoint.json"
    size = file.stat().st_size
    run = pool(2).run
    for at in (size - 5, size - pieces.BLOCK - 5):
        before = _damage(file, at, b"\xff")
        run(_load_part, str(folder), "on rank 1: .*rank-00001.*checksum differs.*damaged")
        _damage(file, at, before)
    run(_load_part, str(folder), None)
    os.truncate(file, size - 100)
    run(_load_part, str(folder), rf"rank-00001.* has {size - 100} bytes, and was written with")
    file.unlink()
    run(_load_part, str(folder), "rank-00001.* is missing")
    whole = index.read_bytes()
    for text in (whole[:-20], whole.replace(b'"ranks"', b'"tanks"'), b"", b"\xff" * 50):
        index.write_bytes(text)
        run(_load_part, str(folder), "is damaged|holds no checkpoint")
    index.write_bytes(whole.replace(b'"version": 1', b'"version": 2'))
    run(_load_part, str(folder), "of version 2, and this library reads version 1")


def _with_body(text: str, change: Any) -> str:
    head, body = text[:-2].split(', "body": ', 1)
    made = json.loads(body)
    change(made)
    new = json.dumps(made)
    head = head.rpartition(" ")[0] + f" {zlib.crc32(new.encode())}"
    return f'{head}, "body": {new}}}\n'


def _set(*path: Any, to: Any) -> Any:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return change


def test_an_index_that_someone_made_up_is_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    index = folder / "checkpoint.json"
    text = index.read_text()
    assert _with_body(text, lambda body: None) == text
    pieces_of_x = ("tensors", "x", "pieces")
    for change, said in (
        (_set(*pieces_of_x, 0, 2, to="../secret"), "KeyError|secret"),
        (_set("files", "../../etc/passwd", to=3), "outside its folder"),
        (_set(*pieces_of_x, 0, 3, to=-8), "has .* bytes|beyond"),
        (_set(*pieces_of_x, 0, 3, to=1 << 40), "beyond the end"),
        (_set(*pieces_of_x, 0, 0, to=[2, 0]), "overlap"),
        (_set(*pieces_of_x, 0, 0, to=[3, 0]), "outside it"),
        (_set(*pieces_of_x, to=[]), "not covered"),
        (_set("tensors", "x", "dtype", to="load"), "not a dtype"),
        (_set("tensors", "x", "shape", to=[1 << 40, 1 << 20]), "not covered"),
        (_set("values", "x", to={"$eval": "1"}), "\\$eval.* is not a value"),
        (_set("values", "x", to={"$default": ["eval", []]}), "not a value"),
    ):
        index.write_text(_with_body(text, change))
        pool(2).run(_load_part, str(folder), said)


class _Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("evil",))


@on_ranks(2)
def test_pickles_that_do_something_are_not_carried_out(rank: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    given = consistent.zeros(2, placement=Placement.all("cpu"), sbp=B)
    folder = tmp_path / f"dcp{rank}"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    for k, path in enumerate((folder, tmp_path / f"{rank}.pt", tmp_path / f"zip{rank}.pt")):
        if k == 1:
            path.write_bytes(pickle.dumps(_Evil()))
        if k == 2:
            torch.save({"x": _Evil()}, path)
        with pytest.raises(CheckpointError, match="posix.mkdir|not a whole file of torch.save"):
            checkpoint.load(path, x=given)
    assert not (tmp_path / "evil").exists()


@on_ranks(2)
def test_files_of_others_that_were_cut_off(rank: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = consistent.parallelize(nn.Linear(300, 30), Placement.all("cpu"), {"weight": S(0)})
    plain = nn.Linear(300, 30)
    if rank == 0:
        save_file(plain.state_dict(), tmp_path / "a.safetensors")
        torch.save(plain.state_dict(), tmp_path / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        path = tmp_path / name
        checkpoint.load(path, model=model)
        for size in (path.stat().st_size - 3, 100, 4, 0):
            if rank == 0:
                os.truncate(path, size)
            with pytest.raises(CheckpointError, match="not a whole file of|cut off"):
                checkpoint.load(path, model=model)


def _no_space(rank: int, folder: str, wait: bool) -> None:
    it = Training("rows")
    checkpoint.save(folder, **it.objects, step=1)
    if rank == 1:  # files of this rank may not grow beyond a few bytes
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        if wait:
            with pytest.raises(CheckpointError, match="on rank 1: OSError.*File too large"):
                checkpoint.save(folder, **it.objects, step=2)
        else:
            checkpoint.save(folder, **it.objects, step=2, wait=False)
            with pytest.raises(CheckpointError, match="in the background.*\n.*on rank 1: OSError"):
                checkpoint.save(folder, **it.objects, step=3)
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    names = sorted(path.name for path in Path(folder).iterdir())
    assert rank or names == [".in-use", "step-00000001"], names  # rank 0 cleans up
    assert checkpoint.load(folder, **it.objects) == {"step": 1}
    checkpoint.save(folder, **it.objects, step=4, wait=wait)
    assert checkpoint.load(folder, **it.objects) == {"step": 4}


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_without_space_on_one_rank(tmp_path: Path, wait: bool) -> None:
    pool(2).run(_no_space, str(tmp_path), wait)


def _cannot_finish(rank: int, folder: str, wait: bool) -> None:
    checkpoint.save(folder, value=1, step=1)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoint.save(folder, value="x" * 5000, step=2, wait=wait, random=False)
            checkpoint.wait()
    finally:
        if rank == 0:
            limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    names = sorted(path.name for path in Path(folder).iterdir())
    assert rank or names == [".in-use", "step-00000001"]


@pytest.mark.parametrize(
    "step", ["check_equal_contents", "_to_saved_layout", "data_of", "write_part", "complete"]
)
def test_an_interrupt_at_a_step_of_a_save_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    _nothing_is_left_if(step, tmp_path, monkeypatch, wait=True)


@pytest.mark.parametrize("step", ["_copies", "BackgroundSave"])
def test_an_interrupt_before_a_save_runs_in_the_background_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    _nothing_is_left_if(step, tmp_path, monkeypatch, wait=False)


def _nothing_is_left_if(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    class Interrupts:
        def __call__(self, *_: object) -> None:
            raise KeyboardInterrupt

        copy = __call__

    checkpoint.save(folder, x=torch.ones(2), step=1)
    monkeypatch.setattr(sys.modules["consistent.checkpoint.save"], step, Interrupts())
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(folder, x=torch.ones(2), step=2, wait=wait)
    assert sorted(path.name for path in folder.iterdir()) == [".in-use", "step-00000001"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_without_space_for_the_index(tmp_path: Path, wait: bool) -> None:
    pool(2).run(_cannot_finish, str(tmp_path), wait)


@on_ranks(2)
def test_partial_and_moved_tensors_are_refused_by_torchs_own_functions(rank: int, tmp_path: Path) -> None:  # fmt: skip  # noqa: E501
    import torch.distributed.checkpoint as dcp

    x = consistent.distribute(torch.ones(4, 3), Placement.all("cpu"), B)
    with pytest.raises(BaseException, match=r"x\.to_global\(sbp=B\)"):
        dcp.save({"x": x.to_global(sbp=consistent.P)}, checkpoint_id=tmp_path)
    dcp.save({"x": x}, checkpoint_id=tmp_path)
    moved = consistent.distribute(torch.ones(4, 6), x.placement, S(1))[:, 1:4]
    with pytest.raises(BaseException, match="the base would not|its base would not"):
        dcp.load({"x": moved}, checkpoint_id=tmp_path)
    for sbp in (S(0, cut="zigzag"), S(0, blocks=1), S(0, sizes=(3, 1))):
        with pytest.raises(BaseException, match="consistent.checkpoint"):
            dcp.save({"x": x.to_global(sbp=sbp)}, checkpoint_id=tmp_path)


def test_a_header_says_what_safetensors_say() -> None:
    length, text = struct.unpack("<Q", (data := pieces.header_of([("a", torch.int64, (2, 3))]))[:8])[0], data[8:]  # fmt: skip  # noqa: E501
    assert len(text) == length and length % 8 == 0
    assert json.loads(text)["a"] == {"dtype": "I64", "shape": [2, 3], "data_offsets": [0, 48]}


@on_ranks(2)
def test_a_mistyped_option(rank: int, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="wiat=True is saved as a value.* Did you mean 'wait'"):
        checkpoint.save(tmp_path, wiat=True)  # type: ignore[call-overload]
    with pytest.raises(CheckpointError, match="strct: the checkpoint has none.*mean 'strict'"):
        checkpoint.load(tmp_path, strct=False)


@on_ranks(2)
def test_names_that_are_like_options_are_saved_without_a_word(rank: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, steps=3, best_step=2, cost=1.5, weights=True, epoch=4)
