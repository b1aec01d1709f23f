"""Copies share what torch's share, and no library writes a file of shards taken for the whole."""

from __future__ import annotations

import copy
import gzip
import io
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file, save_model
from torch import nn

import consistent
from consistent import B, GlobalTensor, P, Placement, S
from consistent.tensor.storage.restored import UNSAVED_ATTRIBUTES
from tests.ranks import SIZES, RankError, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn

LAYOUTS = [(S(0), B), (S(1), S(0)), (B, B), (P, B)]


def _copied(at: Laid) -> Any:
    found = []
    for entries in LAYOUTS:
        for x in (at(randn(5, 4), *entries), at(randn(4, 5), *entries).t(), at.leaf(randn(5, 4))):
            x.mine = [1]
            y = copy.copy(x)
            assert y is not x and y.is_leaf and y.requires_grad == x.requires_grad
            assert y.is_set_to(x) and y.mine is x.mine and y.stride() == x.stride()
            with torch.no_grad():
                y.mul_(2)
            found += [x, y]
    return found


@pytest.mark.parametrize("world", SIZES)
def test_a_shallow_copy_is_another_object_of_the_same_memory(world: int) -> None:
    pool(world).run(compare, _copied, GRIDS[world])


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def _pretrained(module: nn.Module, path: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    entries = next(module.parameters()).sbp
    model: Any = LlamaForCausalLM(config)
    consistent.parallelize(model, next(module.parameters()).placement, {"*.q_proj.*": entries})
    model.save_pretrained(path)


SAVERS: dict[str, Callable[[nn.Module, str], Any]] = {
    "safetensors.save_file": lambda module, path: save_file(module.state_dict(), path),
    "safetensors.save": lambda module, path: save(module.state_dict()),
    "safetensors.save_model": lambda module, path: save_model(module, path),
    "save_pretrained": _pretrained,
}


@pytest.mark.parametrize("name", SAVERS)
@on_ranks(2)
def test_who_asks_for_the_memory_of_a_tensor_writes_nothing(rank: int, name: str) -> None:
    for sbp in (S(0), B, P):
        module = consistent.parallelize(_module(), Placement("cpu", [0, 1]), {"*weight": sbp})
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/file"
            with pytest.raises(BaseException, match=r"x\.full\(\), the whole value, to save"):
                SAVERS[name](module, path)
            weights = [p for p in Path(folder).rglob("*") if "config" not in p.name and p.is_file()]
            assert sum(p.stat().st_size for p in weights) == 0, weights


@on_ranks(2)
def test_the_remedy_of_the_error_saves_the_module(rank: int) -> None:
    module = consistent.parallelize(_module(), Placement("cpu", [0, 1]), {"*weight": S(0)})
    whole = {name: x.full() for name, x in module.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(whole, f"{folder}/file")
        loaded = load_file(f"{folder}/file")
        assert_same(dict(sorted(loaded.items())), dict(sorted(_module().state_dict().items())))


@on_ranks(2)
def test_a_tensor_crosses_to_a_process_that_stands_where_this_one_does(rank: int) -> None:
    for sbp in (S(0), B, P):
        x = Laid(Placement("cpu", [0, 1]))(randn(5, 4), sbp)
        y = ForkingPickler.loads(ForkingPickler.dumps(x))
        assert y.sbp == x.sbp and torch.equal(y.full(), x.full())


def _save_shard(rank: int, path: str) -> None:
    model = consistent.parallelize(_module(), Placement("cpu", [0, 1]), {"0.weight": S(0)})
    if rank == 0:
        with pytest.warns(UserWarning, match="does not name the rank"):
            torch.save(model.state_dict(), path)


def _load_shard(rank: int, path: str, text: str | None) -> None:
    if text is None:
        torch.load(path)
        return
    with pytest.raises(RuntimeError, match=text):
        torch.load(path)


def test_a_file_of_one_rank_is_not_taken_for_the_whole_state(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    pool(2).run(_save_shard, path)
    pool(1).run(_load_shard, path, r"in a world of 1\. Use x\.full\(\) to save .*full_state_dict")
    with pytest.raises(RankError, match=r"this rank is at \(1,\)"):
        pool(2).run(_load_shard, path, None)  # fits rank 0 alone


@on_ranks(2)
def test_one_path_for_the_shards_of_all_ranks_is_warned_of_once(rank: int) -> None:
    place = Laid(Placement("cpu", [0, 1]))
    many = [place(randn(5, n), S(0)) for n in (2, 3)] + [place(randn(5, 2), P)]
    with tempfile.TemporaryDirectory() as folder:
        with pytest.warns(UserWarning, match="checkpoint.save writes") as said:
            torch.save(many, f"{folder}/model.pt")
        assert {str(each.message) for each in said} == {str(said[0].message)}
        assert Path(said[0].filename).name == "test_saving.py"
        for opened in (
            open(f"{folder}/model.pt", "wb"),  # noqa: SIM115
            open(Path(folder) / "model.pt", "wb", buffering=0),  # noqa: SIM115
            gzip.open(f"{folder}/model.pt.gz", "wb"),
        ):
            with opened as file, pytest.warns(UserWarning, match="checkpoint.save writes"):
                torch.save(many, file)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_path_for_each_rank_and_whole_tensors_are_not_warned_of(rank: int) -> None:
    place = Laid(Placement("cpu", [0, 1]))
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("error")
        torch.save(place(randn(5, 2), S(0)), f"{folder}/rank{rank}.pt")
        torch.save(place(randn(5, 2), S(0)), Path(folder) / f"model-{rank}.pt")
        torch.save(place(randn(5, 2), B), f"{folder}/model.pt")
        torch.save(place(randn(5, 2), S(0)), io.BytesIO())
        with open(f"{folder}/model.{rank}.pt", "wb") as own, tempfile.TemporaryFile() as nameless:
            torch.save(place(randn(5, 2), S(0)), own)
            torch.save(place(randn(5, 2), S(0)), nameless)
        with tempfile.NamedTemporaryFile() as named:
            torch.save(place(randn(5, 2), S(0)), named)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_tensor_whose_data_was_asked_for_is_saved(rank: int) -> None:
    x = consistent.ones(4, placement=Placement("cpu", [0, 1]), sbp=S(0), requires_grad=True)
    x.data.add_(1)  # as programs update parameters by hand
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).tolist() == [2.0] * 4
    assert copy.copy(x)._data_was_read


def test_what_describes_one_object_is_not_saved() -> None:
    flags = {name for name, value in vars(GlobalTensor).items() if value is False}
    assert {"_moved_view", "_data_was_read"} <= flags <= set(UNSAVED_ATTRIBUTES)
