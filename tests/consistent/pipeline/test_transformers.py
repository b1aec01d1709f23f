"""Models of transformers, unmodified, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent import Placement
from consistent.nn import pipeline
from tests.ranks import on_ranks
from tests.twins import assert_same

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=31, n_positions=8, n_embd=8, n_layer=4, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return SMALL[name]().double().train()


@pytest.mark.parametrize("name", SMALL)
@on_ranks(2)
def test_trains_as_one_process_does(rank: int, name: str) -> None:
    plain = model_of(name)
    ids = torch.randint(31, (6, 8), generator=torch.Generator().manual_seed(0))
    wanted = plain(input_ids=ids, labels=ids).loss
    wanted.backward()
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(model_of(name), world, micro_batches=3)
    found = pipe.step({"input_ids": ids, "labels": ids})
    assert_same(found, wanted)
    grads = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}
    ours = {n: p.grad for n, p in pipe.model.named_parameters(remove_duplicate=False)}
    assert_same(ours, grads, rtol=1e-6, atol=1e-9)
