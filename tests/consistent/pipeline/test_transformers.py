"""Models of transformers, unmodified, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent import Placement
from consistent.nn import pipeline
from consistent.pipeline.schedules import SCHEDULES
from tests.ranks import ALL, on_ranks
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
            vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    ),
    "tied llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
            use_cache=False, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=31, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2,
            num_heads=2, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        )
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return SMALL[name]().double().train()


def batch(step: int, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows of these lengths, padded."""
    ids = torch.randint(31, (6, 8), generator=torch.Generator().manual_seed(step))
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": ids, "attention_mask": mask.long()}


# No padding, all of it in the last of three micro-batches, in each another.
LENGTHS = [[8] * 6, [8, 8, 8, 8, 3, 5], [8, 2, 4, 4, 7, 8], [8] * 6]


def same_steps(plain: Any, pipe: Any, batches: list[dict[str, Any]]) -> None:
    """Losses, gradients and norms of these batches are those of one process."""
    for given in batches:
        for model in (plain, pipe.model):
            model.zero_grad()
        wanted = plain(**given).loss
        wanted.backward()
        assert_same(pipe.step(given), wanted, rtol=1e-6, atol=1e-9)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (pipe.model, plain)]
        assert_same(norms[0], norms[1], rtol=1e-6, atol=1e-9)
        grads = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}
        ours = {n: p.grad for n, p in pipe.model.named_parameters(remove_duplicate=False)}
        assert_same(ours, grads, rtol=1e-6, atol=1e-9)


# A tied llama is trained over two ranks for each stage below, and gpt2 is tied too.
@pytest.mark.parametrize("name", [name for name in SMALL if ALL or name != "tied llama"])
@on_ranks(2)
def test_trains_with_padding_as_one_process_does(rank: int, name: str) -> None:
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(model_of(name), world, micro_batches=3)
    batches = [batch(k, lengths) for k, lengths in enumerate(LENGTHS)]
    del batches[0]["attention_mask"]
    if name == "t5":  # its stacks are whole in a stage, and ask for the values of masks themselves
        batches = batches[:1]
    same_steps(model_of(name), pipe, batches)
    # Without a mask, with one of ones alone, and with padding: no more however many batches came.
    assert len(pipe._engine.programs) <= 3


@on_ranks(3)
def test_padding_in_an_encoder_and_a_decoder_that_are_cut(rank: int) -> None:
    world = [Placement("cpu", [r]) for r in range(3)]
    split = ["encoder.block.1", "decoder.block.1"]
    pipe = pipeline(model_of("t5"), world, split, micro_batches=3)
    same_steps(model_of("t5"), pipe, [batch(0, LENGTHS[1]), batch(1, LENGTHS[3])])


# test_pipeline.py trains under every schedule. Of these, one has one stage on each rank, one has
# several, and one has two in a V; the last two split the backward.
KINDS = ["1f1b", "interleavedzerobubble", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES if ALL else KINDS)
@on_ranks(2)
def test_padding_in_every_kind_of_schedule(rank: int, schedule: str) -> None:
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    pipe = pipeline(model_of("gpt2"), world, micro_batches=4, schedule=schedule)
    same_steps(model_of("gpt2"), pipe, [batch(0, LENGTHS[1]), batch(1, LENGTHS[2])])


@on_ranks(4)
def test_padding_in_stages_over_two_ranks_each(rank: int) -> None:
    world = [Placement("cpu", [0, 1]), Placement("cpu", [2, 3])]
    for plan in (["zero3", "data"], ["tensor", "zero2"]) if ALL else (["zero3", "tensor"],):
        pipe = pipeline(model_of("tied llama"), world, micro_batches=3, plan=plan)
        same_steps(model_of("tied llama"), pipe, [batch(0, LENGTHS[1])])
