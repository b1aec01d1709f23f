"""A model from safetensors files: each rank reads its slices, and what does not fit is said."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consistent import B, Placement, S
from consistent.nn import from_pretrained
from tests.ranks import pool
from tests.twins import GRIDS, assert_same


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


def _loaded(rank: int, folder: str, ranks: Any, plan: Any) -> Any:
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = from_pretrained(LlamaForCausalLM, folder, Placement("cpu", ranks), plan)
    assert not model.training
    with torch.no_grad():
        return model(IDS).logits.full(), _generated(model)


def _generated(model: Any) -> list[list[int]]:
    return model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize("name", ["tied", "apart"])
def test_a_model_of_transformers_is_read_in_slices(tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / name)
    model = _llama(folder)
    wanted = model(IDS).logits.detach(), _generated(model)
    assert len(list(Path(folder).glob("*.safetensors"))) > 1
    for ranks, plan in ((2, "zero3"), (3, "data"), (4, {"0": "zero3", "1": "data"})):
        for found in pool(ranks).run(_loaded, folder, GRIDS[ranks], plan):
            assert_same(found, wanted)


def _reads(rank: int, folder: str) -> Any:
    from consistent.nn import pretrained

    read: list[tuple[str, int]] = []
    part = pretrained._SafetensorsReader.part

    def counted(self: Any, name: str, starts: Any, sizes: Any) -> torch.Tensor:
        found = part(self, name, starts, sizes)
        read.append((name, found.numel()))
        return found

    pretrained._SafetensorsReader.part = counted  # type: ignore[method-assign]
    try:
        from_pretrained(lambda: nn.Linear(4, 6), folder, Placement("cpu", [0, 1]), {"weight": S(0)})
    finally:
        pretrained._SafetensorsReader.part = part  # type: ignore[method-assign]
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
