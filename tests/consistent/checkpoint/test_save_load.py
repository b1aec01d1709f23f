"""What one layout and number of ranks saved, another one loads: the same bits, the same losses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import consistent
from consistent import B, P, Placement, S, checkpoint
from consistent.checkpoint.files import index
from tests.consistent.checkpoint.training import LAYOUTS, Training, whole
from tests.ranks import on_ranks, pool
from tests.twins import assert_same


def _save(rank: int, layout: str, folder: str, wait: bool = True) -> Any:
    it = Training(layout)
    it.run(4)
    path = checkpoint.save(folder, **it.objects, step=it.step, wait=wait, names=("a", {1: 2.5}))
    values = it.values()
    return path, values, it.run(20)  # an asynchronous save goes on meanwhile


def _load(rank: int, layout: str, folder: str, drop: float = 0.3) -> Any:
    it = Training(layout, seed=1)
    told = checkpoint.load(folder, **it.objects)
    it.step = told["step"]
    assert told == {"step": 4, "names": ("a", {1: 2.5})} and it.model.seen == 4
    assert it.model.head.weight is it.model.table.weight
    values = it.values()
    it.model.drop.p = drop
    return values, it.run(20)


def _ranks(layout: str) -> int:
    return 1 if layout == "plain" else LAYOUTS[layout][0]


CHAIN = (
    "three",
    "plain",
    "grid",
    "zero3",
    "columns",
    "zero3 and tensor",
    "twice",
    "one",
    "zero1",
    "replicated",
    "rows",
)


def test_a_chain_of_layouts_keeps_every_bit_and_the_next_twenty_losses(tmp_path: Path) -> None:
    _, values, with_dropout = pool(2).run(_save, "rows", str(tmp_path / "0"))[0]
    without = None
    for k, layout in enumerate(CHAIN):
        ranks = pool(_ranks(layout))
        drop = 0.0 if k else 0.3  # plain torch draws other numbers
        loaded = ranks.run(_load, layout, str(tmp_path / str(k)), drop)
        for at, (found, losses) in enumerate(loaded):
            assert found.keys() == values.keys()
            for name, x in values.items():
                assert torch.equal(found[name], x), f"{layout}, rank {at}: {name}"
            without = without or (losses if k else None)
            wanted = without if k else with_dropout
            torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-12)
        ranks.run(_save_again, layout, str(tmp_path / str(k)), str(tmp_path / str(k + 1)))
    _, losses = pool(3).run(_load, "three", str(tmp_path / "0"))[0]  # as it was at the start
    torch.testing.assert_close(losses, with_dropout, rtol=1e-9, atol=1e-12)


def _save_again(rank: int, layout: str, folder: str, to: str) -> None:
    it = Training(layout, seed=1)
    told = checkpoint.load(folder, **it.objects)
    checkpoint.save(to, **it.objects, **told)


@pytest.mark.parametrize("layout", ["rows", "grid"])
def test_a_save_in_the_background_is_of_the_moment_of_its_call(tmp_path: Path, layout: str) -> None:
    folder = str(tmp_path)
    _, values, _ = pool(_ranks(layout)).run(_save, layout, folder, False)[0]
    pool(_ranks(layout)).run(_wait)
    found, _ = pool(2).run(_load, "columns", folder)[0]
    assert all(torch.equal(found[name], x) for name, x in values.items())


def _wait(rank: int) -> None:
    checkpoint.wait()
    checkpoint.wait()  # once more does nothing


def _optimizer_round(rank: int, folder: str, name: str) -> None:
    made = getattr(torch.optim, name)
    it = Training("rows", optimizer=made)
    it.model.drop.p = 0.0  # both draw from the same numbers
    it.run(2)
    checkpoint.save(folder, model=it.model, optimizer=it.optimizer, keep=1)
    other = Training("rows", seed=1, optimizer=made)
    other.step, other.model.drop.p = it.step, 0.0
    checkpoint.load(folder, model=other.model, optimizer=other.optimizer)
    assert other.optimizer.state_dict()["param_groups"] == it.optimizer.state_dict()["param_groups"]
    assert_same(other.values(), it.values())
    for group in (*other.optimizer.param_groups, *it.optimizer.param_groups):
        group["lr"] = 0.01
    assert other.run(3) == it.run(3)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor", "RMSprop", "Adagrad"])
def test_optimizers(tmp_path: Path, name: str) -> None:
    pool(2).run(_optimizer_round, str(tmp_path), name)


@on_ranks(2)
def test_the_state_of_an_optimizer_lies_as_its_parameters_do(rank: int, tmp_path: Path) -> None:
    it = Training("rows")
    it.run(1)
    checkpoint.save(tmp_path, **it.objects)
    other = Training("columns")
    checkpoint.load(tmp_path, **other.objects)
    for p, state in other.optimizer.state.items():
        assert all(state[k].sbp == p.sbp for k in ("exp_avg", "exp_avg_sq"))
        assert not isinstance(state["step"], consistent.GlobalTensor)


@on_ranks(2, 3)
def test_groups_and_parameters_in_another_order(rank: int, tmp_path: Path) -> None:
    def optimizer(model: Any, turned: bool) -> Any:
        pairs = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in pairs if ("bias" in n) == bias][:: -1 if turned else 1],
             "lr": 0.1 if bias else 0.01}
            for bias in (turned, not turned)
        ]  # fmt: skip
        return torch.optim.Adam(groups)

    it, other = Training("one"), Training("one", seed=1)
    it.optimizer, other.optimizer = optimizer(it.model, False), optimizer(other.model, True)
    it.run(2)
    checkpoint.save(tmp_path, model=it.model, optimizer=it.optimizer)
    checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
    assert [g["lr"] for g in it.optimizer.param_groups] == [0.01, 0.1]
    assert [g["lr"] for g in other.optimizer.param_groups] == [0.1, 0.01]
    assert_same(other.values(), it.values())


@on_ranks(2)
def test_two_models_and_their_optimizers(rank: int, tmp_path: Path) -> None:
    a, b = Training("rows"), Training("columns", seed=1)
    objects = lambda x, y: {  # noqa: E731
        "gen": x.model, "critic": y.model, "gen_steps": x.optimizer, "critic_steps": y.optimizer
    }  # fmt: skip
    a.run(2), b.run(3)
    checkpoint.save(tmp_path, **objects(a, b))
    c, d = Training("columns", seed=2), Training("replicated", seed=3)
    checkpoint.load(tmp_path, **objects(c, d))
    assert_same(c.values(), a.values())
    assert_same(d.values(), b.values())


@on_ranks(2)
def test_random_numbers_go_on(rank: int, tmp_path: Path) -> None:
    placement = Placement("cpu", [0, 1])

    def draw() -> list[Any]:
        drawn = consistent.randn(5, placement=placement, sbp=S(0)).tolist()
        return [drawn, torch.rand(2).tolist(), random.random(), np.random.rand(2).tolist()]

    torch.manual_seed(7)
    torch.rand(rank + 1)  # each rank has drawn other numbers for itself
    random.seed(rank)
    draw()
    checkpoint.save(tmp_path)
    wanted = draw()
    draw()
    checkpoint.load(tmp_path)
    assert draw() == wanted
    checkpoint.save(tmp_path, random=False)
    later = draw()
    checkpoint.load(tmp_path)
    assert draw()[0] != later[0]


def _draw(rank: int, folder: str, ranks: int, save: bool) -> Any:
    placement = Placement("cpu", range(ranks))
    if save:
        torch.manual_seed(7)
        torch.rand(rank + 1)
        consistent.randn(5, placement=placement, sbp=B)
        checkpoint.save(folder)
    else:
        checkpoint.load(folder)
    return consistent.randn(5, placement=placement, sbp=S(0)).tolist()


def test_random_numbers_of_global_tensors_go_on_on_other_ranks(tmp_path: Path) -> None:
    wanted = pool(2).run(_draw, str(tmp_path), 2, True)[0]
    for ranks in (1, 2, 3):
        assert pool(ranks).run(_draw, str(tmp_path), ranks, False) == [wanted] * ranks


@on_ranks(2, 3)
def test_tensors_of_all_kinds(rank: int, tmp_path: Path) -> None:
    everywhere, first = Placement.all("cpu"), Placement("cpu", [1])
    x = torch.arange(15.0).reshape(5, 3)
    given = {
        "split": consistent.distribute(x, everywhere, S(1)),
        "partial": consistent.distribute(x, everywhere, B).to_global(sbp=P),
        "elsewhere": consistent.distribute(x, first, B),
        "turned": consistent.distribute(x, everywhere, S(0)).t(),
        "few": consistent.distribute(x[:1], everywhere, S(0)),
        "none": consistent.zeros(0, 3, placement=everywhere, sbp=S(1)),
        "one": consistent.full((), 2.5, placement=everywhere, sbp=B),
        "plain": x.t(),
    }
    for k, dtype in enumerate(
        (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64,
         torch.complex128, torch.float64, torch.float8_e4m3fn, torch.uint16)
    ):  # fmt: skip
        y = x.to(dtype) if dtype != torch.bool else x % 2 == 0
        given[f"dtype {k}"] = consistent.from_local(y, everywhere, B)
    checkpoint.save(tmp_path, tensors=given)
    told = checkpoint.load(tmp_path)["tensors"]
    assert list(told) == list(given)
    for name, value in given.items():
        assert told[name].dtype == value.dtype and type(told[name]) is torch.Tensor
        wanted, found = whole(value), told[name]
        if "dtype 8" in name:  # torch compares no float8
            wanted, found = wanted.view(torch.uint8), found.view(torch.uint8)
        assert torch.equal(wanted, found), name
    target = {k: torch.zeros_like(x) for k, x in given.items() if "dtype" not in k}
    target["partial"] = target["partial"].to_global(sbp=S(0))
    rest = {k: x for k, x in given.items() if "dtype" in k}
    checkpoint.load(tmp_path, tensors={**target, **rest})
    assert_same({k: whole(v) for k, v in target.items()}, {k: told[k] for k in target})


@on_ranks(2)
def test_replicated_tensors_are_written_once_by_all_ranks(rank: int, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)])
    consistent.parallelize(model, Placement.all("cpu"))
    path = Path(checkpoint.save(tmp_path, model=model, random=False))
    sizes = [file.stat().st_size for file in sorted(path.glob("*.safetensors"))]
    total = sum(p.numel() * 4 for p in model.parameters())
    assert len(sizes) == 2 and total < sum(sizes) < total + 4000
    assert max(sizes) < 1.1 * min(sizes)


@on_ranks(2)
def test_a_tied_tensor_is_written_once(rank: int, tmp_path: Path) -> None:
    it = Training("rows")
    path = checkpoint.save(tmp_path, model=it.model)
    found = index.read(f"{path}/checkpoint.json")
    assert found.aliases == {"model.head.weight": "model.table.weight"}
    it.model.head.weight = torch.nn.Parameter(torch.zeros(5, 7).double())
    checkpoint.load(tmp_path, model=it.model)
    assert torch.equal(it.model.head.weight, it.model.table.weight.full())


@on_ranks(2)
def test_the_last_few_are_kept_in_the_order_of_saving(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert checkpoint.latest(folder) is None
    for step in (3, 7, 5, 7):
        path = checkpoint.save(folder, step=step, keep=2, value=step)
        assert checkpoint.latest(folder) == path
        assert checkpoint.load(folder)["step"] == step
    kept = [".in-use", "step-00000005", "step-00000007-again-4"]
    assert sorted(p.name for p in folder.iterdir()) == kept
    assert checkpoint.load(folder / "step-00000005") == {"step": 5, "value": 5}
    checkpoint.save(folder, keep=None, value=1)
    assert len(list(folder.iterdir())) == 4 and checkpoint.load(folder) == {"value": 1}


@on_ranks(2)
def test_pieces_are_told_once_and_again_when_they_change(rank: int, tmp_path: Path) -> None:
    """Between the saves tensors change their layout, their names, and one fails on one rank."""
    placement = Placement("cpu", [0, 1])
    x = torch.arange(12.0).view(4, 3)
    states = [
        {"x": consistent.distribute(x, placement, S(0))},
        {"x": consistent.distribute(x + 1, placement, S(0))},
        {"x": consistent.distribute(x + 2, placement, S(1))},
        {"x": x + rank},
        {"x": torch.zeros(2)},
        {"y": consistent.distribute(x + 3, placement, B)},
        {"y": consistent.distribute(x + 4, placement, B)},
    ]
    for i, state in enumerate(states):
        if i in (2, 5):
            with pytest.raises(checkpoint.CheckpointError):  # the ranks' names differ
                checkpoint.save(tmp_path, state={f"{rank}": x}, random=False)
        for wait in (True, False):
            checkpoint.save(tmp_path, state=state, random=False, wait=wait, keep=1)
            checkpoint.wait()
            found = checkpoint.load(tmp_path)["state"]
            assert list(found) == list(state)
            for name, value in state.items():
                wanted = value.full() if isinstance(value, consistent.GlobalTensor) else value
                assert torch.equal(found[name], wanted)


@on_ranks(2)
def test_a_value_that_differs_between_ranks_comes_back_to_each(rank: int, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, mine={"position": rank, "at": torch.tensor([rank])}, all=3)
    assert checkpoint.load(tmp_path) == {"mine": {"position": rank, "at": torch.tensor([rank])},
                                         "all": 3}  # fmt: skip


@on_ranks(2)
def test_what_takes_part_in_dcp_reads_it_too(rank: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    it = Training("rows")
    reader = checkpoint.opened(checkpoint.save(tmp_path, model=it.model))
    state = {f"model.{k}": torch.zeros_like(x) for k, x in it.model.named_parameters()}
    dcp.load(state, storage_reader=reader)
    assert_same({k: whole(x) for k, x in state.items()},
                {f"model.{k}": whole(x) for k, x in it.model.named_parameters()})  # fmt: skip
