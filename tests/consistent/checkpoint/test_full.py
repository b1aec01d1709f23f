"""The whole state on one rank, and files of it that other tools read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import consistent
from consistent import B, P, Placement, S, checkpoint
from mirrored.transports.counting import Counting
from mirrored.transports.default import current, use
from tests.consistent.checkpoint.training import Training
from tests.ranks import on_ranks
from tests.twins import assert_same


def _plain() -> Any:
    return Training("plain").model


@pytest.mark.parametrize("at", [0, 1])
@on_ranks(2)
def test_the_whole_state_is_on_one_rank(rank: int, at: int) -> None:
    whole = checkpoint.full_state_dict(Training("rows").model, rank=at)
    if rank != at:
        assert whole == {}
        return
    assert_same(whole, _plain().state_dict())
    assert whole["head.weight"] is whole["table.weight"]
    assert all(type(x) is torch.Tensor for k, x in whole.items() if "extra" not in k)


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor"])
@on_ranks(2)
def test_later_training_does_not_change_what_was_taken(rank: int, plan: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    consistent.parallelize(model, Placement.all("cpu"), plan)
    model[1].register_buffer("plain", torch.zeros(2))
    whole = checkpoint.full_state_dict(model)
    kept = {name: x.clone() for name, x in whole.items()}
    with torch.no_grad():
        for x in model.state_dict().values():
            x.add_(1)
    assert_same(whole, kept)


@on_ranks(3, 4)
def test_only_what_that_rank_lacks_is_sent(rank: int) -> None:
    ranks = current().size
    placement = Placement("cpu", range(ranks))
    x = torch.arange(40.0).reshape(10, 4)
    for given, sent in ((S(0), 0 if rank == 0 else len(range(rank, 10, ranks)) * 16), (B, 0)):
        module = torch.nn.Module()
        module.x = torch.nn.Parameter(consistent.distribute(x, placement, given))
        with use(Counting(current())) as counting:
            whole = checkpoint.full_state_dict(module)
        assert counting.bytes == sent, (given, rank)
        if rank == 0:
            assert torch.equal(whole["x"], x)


@on_ranks(2)
def test_partial_tensors_and_tensors_elsewhere(rank: int) -> None:
    x = torch.arange(6.0).reshape(3, 2)
    module = torch.nn.Module()
    module.register_buffer("p", consistent.distribute(x, Placement.all("cpu"), B).to_global(sbp=P))
    module.register_buffer("other", consistent.distribute(x, Placement("cpu", [1]), B))
    module.register_buffer("plain", x)
    whole = checkpoint.full_state_dict(module)
    if rank == 0:
        assert_same(whole, {"p": x, "other": x, "plain": x})


@on_ranks(2)
def test_one_file(rank: int, tmp_path: Path) -> None:
    model = Training("columns").model
    checkpoint.save_full(model, tmp_path / "a.safetensors")
    checkpoint.save_full(model, tmp_path / "a.pt", rank=1)
    wanted = _plain().state_dict()
    tensors = {k: x for k, x in wanted.items() if isinstance(x, torch.Tensor)}
    found = load_file(tmp_path / "a.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(tensors.items())))
    assert_same(torch.load(tmp_path / "a.pt"), wanted)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.safetensors"]
    with pytest.raises(FileNotFoundError, match="on rank 0: .*No such file or directory"):
        checkpoint.save_full(model, tmp_path / "none" / "a.safetensors")
    with pytest.raises(FileNotFoundError, match="on rank 0: .*No such file or directory"):
        checkpoint.save_full(model, tmp_path / "none" / "a.pt")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@on_ranks(2)
def test_save_pretrained_writes_what_others_read(rank: int, tmp_path: Path) -> None:
    model = _llama()
    wanted = {k: x.clone() for k, x in model.state_dict().items()}
    consistent.parallelize(model, Placement.all("cpu"), {"*proj.weight": S(0)})
    whole = checkpoint.full_state_dict(model)
    if rank == 0:
        model.save_pretrained(tmp_path, state_dict=whole)
        save_file({k: x.clone() for k, x in whole.items()}, tmp_path / "again.st")
    current().gather_objects(None, (0, 1))
    found = type(model).from_pretrained(tmp_path).state_dict()
    assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))
    other = _llama()
    consistent.parallelize(other, Placement.all("cpu"), {"*embed*": S(1), "*proj.weight": S(1)})
    for p in other.parameters():
        p.data.zero_()
    checkpoint.load(tmp_path, model=other)  # a tied name is not in the file
    assert_same({k: x.full() for k, x in other.state_dict().items()}, wanted)
