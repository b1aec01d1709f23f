"""Checkpoints that FSDP2, torch.distributed.checkpoint, torch.save and safetensors wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from consistent import checkpoint
from tests.consistent.checkpoint.training import Training
from tests.ranks import on_ranks, pool
from tests.twins import assert_same


def _write_fsdp(rank: int, folder: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    it = Training("plain")
    it.model.drop.p = 0.0
    fully_shard(it.model, mesh=init_device_mesh("cpu", (2,)))
    it.optimizer = torch.optim.AdamW(it.model.parameters(), lr=0.05)
    it.run(2)
    model, optimizer = get_state_dict(it.model, it.optimizer)
    dcp.save({"model": model, "optim": optimizer, "epoch": 4}, checkpoint_id=folder)
    dcp.save(model, checkpoint_id=f"{folder}/model_only")
    return {k: x.full_tensor() for k, x in model.items() if hasattr(x, "full_tensor")}, {
        name: {k: x.full_tensor() for k, x in state.items() if hasattr(x, "full_tensor")}
        for name, state in optimizer["state"].items()
    }


def _read(rank: int, layout: str, path: str, optimizer: str | None) -> Any:
    it = Training(layout, seed=1)
    given = {"model": it.model, **({optimizer: it.optimizer} if optimizer else {})}
    told = checkpoint.load(path, **given)
    names = {id(p): name for name, p in it.model.named_parameters()}
    state = {
        names[id(p)]: {k: x.full() for k, x in s.items() if k != "step"}
        for p, s in it.optimizer.state.items()
    }
    tensors = {k: x for k, x in it.model.state_dict().items() if isinstance(x, torch.Tensor)}
    return {k: x.full() for k, x in tensors.items()}, state, told


@pytest.mark.parametrize("layout", ["columns", "three"])
def test_fsdp2(tmp_path: Path, layout: str) -> None:
    wanted, state = pool(2).run(_write_fsdp, str(tmp_path))[0]
    ranks = pool(3 if layout == "three" else 2)
    for found, own_state, told in ranks.run(_read, layout, str(tmp_path), "optim"):
        assert all(torch.equal(found[k], x) for k, x in wanted.items()) and told == {"epoch": 4}
        assert_same({k: own_state[k] for k in state}, state)
    found, _, told = ranks.run(_read, layout, str(tmp_path / "model_only"), None)[0]
    assert all(torch.equal(found[k], x) for k, x in wanted.items()) and told == {}


@on_ranks(2, 3)
def test_files_of_torch_save_and_safetensors(rank: int, tmp_path: Path) -> None:
    world = torch.distributed.get_world_size()
    it = Training("plain")
    it.run(2)
    state = it.model.state_dict()
    tensors = {k: x.clone() for k, x in state.items() if isinstance(x, torch.Tensor)}
    if rank == 0:
        whole = {"model": state, "optimizer": it.optimizer.state_dict(), "epoch": 3}
        torch.save(whole, tmp_path / "all.pt")
        torch.save(tensors, tmp_path / "model.pt")
        save_file(tensors, tmp_path / "model.safetensors")
    torch.distributed.barrier()
    layout = "columns" if world == 2 else "three"
    for name in ("all.pt", "model.pt", "model.safetensors"):
        optimizer = "optimizer" if name == "all.pt" else None
        found, own_state, told = _read(rank, layout, str(tmp_path / name), optimizer)
        assert_same(found, tensors)
        assert told == ({"epoch": 3} if optimizer else {})
        if optimizer:
            names = {id(p): k for k, p in it.model.named_parameters()}
            assert_same(own_state, {
                names[id(p)]: {k: x for k, x in s.items() if k != "step"}
                for p, s in it.optimizer.state.items()
            })  # fmt: skip


@on_ranks(2)
def test_values_of_torchs_own_checkpoints(rank: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    given = {"a": {"b": [1, 2.5, "x"], "c": {"d": None}}, "n": 3, "t": torch.arange(3)}
    dcp.save(given, checkpoint_id=tmp_path)
    assert_same(
        checkpoint.load(tmp_path, t=torch.zeros(3, dtype=torch.int64)),
        {"t": torch.arange(3), "n": 3},
    )  # noqa: E501
