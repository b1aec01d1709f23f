"""Modules built on meta: only shards are allocated, and the values are those of one rank."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn import from_pretrained
from tests.ranks import on_ranks, pool
from tests.twins import GRIDS, assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6))
        self.attend = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


class Scaled(nn.Module):
    """Initialises what is inside it, as models of transformers and nanoGPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=7.0)
            nn.init.zeros_(module.bias)


def _initialised(rank: int, cls: Any, ranks: Any, plan: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = cls()
    model = consistent.parallelize(model, Placement("cpu", ranks), plan)
    assert all(p.requires_grad for p in model.parameters())
    return {name: x.full() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("cls", [Net, Scaled])
def test_values_are_those_of_one_rank_whatever_the_plan(cls: type) -> None:
    (alone, *_) = pool(2).run(_initialised, cls, [0], "data")
    assert float(alone[list(alone)[0]].std()) > 0.1
    for ranks, plan in ((2, "zero3"), (3, "zero1"), (4, {"0": "zero3", "1": "data"})):
        for found in pool(ranks).run(_initialised, cls, GRIDS[ranks], plan):
            assert_same(found, alone)


@on_ranks(2)
def test_only_the_shard_is_allocated(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    with torch.device("meta"):
        model = nn.Linear(10, 7)
    consistent.parallelize(model, placement, {"*": S(0)})
    assert model.weight.to_local().shape == ((4, 3)[rank], 10)
    assert model.weight.to_local().untyped_storage().nbytes() == (4, 3)[rank] * 10 * 4


class Bare(nn.Module):
    """Has values that only its constructor knows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


@on_ranks(2)
def test_values_that_nothing_writes_are_nan_with_a_warning(rank: int) -> None:
    with torch.device("meta"):
        model = Bare()
    with pytest.warns(UserWarning, match="table.*built on meta"):
        consistent.parallelize(model, Placement("cpu", [0, 1]))
    assert model.table.isnan().all()
    with torch.device("meta"):
        whole = Bare(torch.int64)
    with pytest.raises(ValueError, match="table was built on meta.*Build it outside"):
        consistent.parallelize(whole, Placement("cpu", [0, 1]))


@on_ranks(2)
def test_values_that_a_module_has_are_kept(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = model[0].weight.detach().clone()
    model[1].to("meta")
    consistent.parallelize(model, Placement("cpu", [0, 1]), "zero3")
    assert torch.equal(model[0].weight.full(), before)
    assert not model[1].weight.isnan().any()


# -- from files ------------------------------------------------------------------------------------


def _llama(folder: str | None = None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=33, hidden_size=8, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=folder is not None and folder.endswith("tied"),
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if folder is not None:
        model.save_pretrained(folder, max_shard_size="2KB")
    return model


IDS = torch.tensor([[1, 5, 9, 2], [7, 7, 3, 0], [4, 30, 31, 32]])


def _loaded(rank: int, folder: str, ranks: Any, plan: Any) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = from_pretrained(LlamaForCausalLM, folder, Placement("cpu", ranks), plan)
    assert not model.training
    with torch.no_grad():
        return model(IDS).logits.full()


@pytest.mark.parametrize("name", ["tied", "apart"])
def test_a_model_of_transformers_is_read_in_slices(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / name)
    wanted = _llama(folder)(IDS).logits.detach()
    assert len(list(Path(folder).glob("*.safetensors"))) > 1
    for ranks, plan in ((2, "zero3"), (3, "data"), (4, {"0": "zero3", "1": "data"})):
        for found in pool(ranks).run(_loaded, folder, GRIDS[ranks], plan):
            torch.testing.assert_close(found, wanted)


def _reads(rank: int, folder: str) -> Any:
    from consistent.nn import pretrained

    read: list[tuple[str, int]] = []
    part = pretrained._Files.part

    def counted(self: Any, name: str, starts: Any, sizes: Any) -> torch.Tensor:
        found = part(self, name, starts, sizes)
        read.append((name, found.numel()))
        return found

    pretrained._Files.part = counted  # type: ignore[method-assign]
    try:
        from_pretrained(lambda: nn.Linear(4, 6), folder, Placement("cpu", [0, 1]), {"weight": S(0)})
    finally:
        pretrained._Files.part = part  # type: ignore[method-assign]
    return sorted(read)


def test_each_rank_reads_its_slices_only(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(nn.Linear(4, 6).state_dict(), tmp_path / "model.safetensors")
    assert pool(2).run(_reads, str(tmp_path)) == [[("bias", 6), ("weight", 12)]] * 2


def _wrong(rank: int, folder: str, out: int) -> Any:
    placement = Placement("cpu", [0, 1])
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = from_pretrained(lambda: nn.Linear(4, out), folder, placement, {"*": B})
    return [str(each.message) for each in caught], model.bias.isnan().any().item()


def test_missing_and_unexpected_names_are_reported(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(6, 4), "more": torch.ones(2)}, tmp_path / "model.safetensors")
    for messages, has_nan in pool(2).run(_wrong, str(tmp_path), 6):
        assert any("no 'bias'" in m for m in messages) and any("'more'" in m for m in messages)
        assert has_nan  # reset_parameters writes the weight too, which was read
    with pytest.raises(ValueError, match="'weight' is .5, 4. in the model.*is .6, 4."):
        pool(2).run(_wrong, str(tmp_path), 5)


def test_a_folder_without_such_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin.*save_pretrained"):
        from_pretrained(nn.Identity, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert isinstance(pool(2).run(_empty, str(tmp_path)), list)


def _empty(rank: int, folder: str) -> None:
    from_pretrained(nn.Identity, folder, Placement("cpu", [0, 1]))
