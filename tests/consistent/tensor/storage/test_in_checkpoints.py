"""Global tensors in torch.distributed.checkpoint, by its own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import consistent
from consistent import B, Placement, S
from tests.consistent.checkpoint.training import Training, whole
from tests.ranks import on_ranks
from tests.twins import GRIDS, assert_same


def _state(placement: Placement, entry: Any) -> dict[str, Any]:
    made = torch.arange(15.0).reshape(5, 3)
    rest = (S(1),) if placement.ndim == 2 else ()
    return {
        "x": consistent.distribute(made, placement, (entry, *rest)),
        "few": consistent.distribute(made[:1], placement, (S(0), *[B for _ in rest])),
        "empty": consistent.zeros(0, 4, placement=placement, sbp=(S(1), *[B for _ in rest])),
        "scalar": consistent.full((), 2.5, placement=placement, sbp=(B,) * placement.ndim),
        "elsewhere": consistent.distribute(made, Placement("cpu", [1]), B),
        "plain": made.t().clone(),
        "number": 3,
    }


def _zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {k: x * 0 if isinstance(x, torch.Tensor) else 0 for k, x in state.items()}


@on_ranks(2, 3, 4)
def test_save_and_load(rank: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    placement = Placement("cpu", GRIDS[dist.get_world_size()])
    for k, entry in enumerate((S(0), B)):
        state = _state(placement, entry)
        dcp.save(state, checkpoint_id=tmp_path / str(k))
        for other in (S(0), S(1), B):
            target = _zeros(_state(placement, other if placement.ndim == 1 else S(0)))
            target["few"] = target["few"].to_global(placement=Placement("cpu", [0]), sbp=B)
            dcp.load(target, checkpoint_id=tmp_path / str(k))
            assert target["number"] == 3
            assert_same(
                {k: whole(x) for k, x in target.items() if k != "number"},
                {k: whole(x) for k, x in state.items() if k != "number"},
            )


@on_ranks(2)
def test_replicated_tensors_are_written_once_by_all_ranks(rank: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    placement = Placement.all("cpu")
    dcp.save({str(k): consistent.ones(64, 64, placement=placement, sbp=B) for k in range(8)},
             checkpoint_id=tmp_path)  # fmt: skip
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.distcp"))]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    assert 8 * 64 * 64 * 4 < sum(sizes) < 1.3 * 8 * 64 * 64 * 4


@pytest.mark.parametrize("way", ["stager", "writer"])
@on_ranks(2)
def test_an_asynchronous_save_is_of_the_moment_of_its_call(
    rank: int, tmp_path: Path, way: str
) -> None:
    import torch.distributed.checkpoint as dcp

    it = Training("rows")
    it.run(1)
    state = dict(it.model.named_parameters())
    wanted = {k: whole(x).clone() for k, x in state.items()}
    own = dist.new_group(backend="gloo")
    kind: Any = {"checkpoint_id": tmp_path} if way == "stager" else {
        "storage_writer": dcp.FileSystemWriter(tmp_path)
    }  # fmt: skip
    done = dcp.async_save(state, process_group=own, **kind)
    it.run(3)  # the ranks talk meanwhile
    done.result()
    target = {k: torch.zeros_like(x) for k, x in Training("columns").model.named_parameters()}
    dcp.load(target, checkpoint_id=tmp_path)
    assert_same({k: whole(x) for k, x in target.items()}, wanted)


@on_ranks(2)
def test_state_dicts_of_models_and_optimizers(rank: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_state_dict,
    )

    it, other = Training("rows"), Training("columns", seed=1)
    for each in (it, other):  # torch wants state of every parameter, also of one without gradient
        used = [p for name, p in each.model.named_parameters() if name != "nothing"]
        each.optimizer = torch.optim.AdamW(used, lr=0.05)
    it.run(2)
    model, optimizer = get_state_dict(it.model, it.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    model, optimizer = get_state_dict(other.model, other.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        other.model, other.optimizer,
        model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    assert_same(other.values(), it.values())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(it.model, options=options)
    assert not full if rank else type(full["first.weight"]) is torch.Tensor
    full = get_model_state_dict(it.model, options=StateDictOptions(full_state_dict=True))
    third = Training("columns", seed=2)
    set_model_state_dict(third.model, full, options=StateDictOptions(full_state_dict=True))
    third.optimizer.state = it.optimizer.state
    assert torch.equal(third.model.first.weight.full(), it.model.first.weight.full())
