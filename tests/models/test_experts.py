"""Unmodified mixtures whose tokens are sent to their experts: loss, gradients and the loss after a
step are those of one process, losses on the balance of experts included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of the transformers library")

import consistent
from consistent import B, Placement, S
from tests.models.architectures import MIXTURES, MODELS, NO_DROPOUT, tokens
from tests.models.steps import allowed, step, worst
from tests.ranks import ALL, pool

BALANCED = frozenset("Mixtral Qwen2Moe Qwen3Moe Olmoe GraniteMoe GptOss".split())
GRID = [[0, 1], [2, 3]]
LINES: list[tuple[str, int]] = [("Mixtral", 2), ("DeepseekV3", 3), ("GptOss", 4)]
GRIDS = ["Mixtral"]
if ALL:
    LINES = [(name, n) for name in MIXTURES for n in (2, 3, 4)]
    GRIDS = list(MIXTURES)


def _made(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, inputs = MODELS[name]()
    return model.eval(), inputs | ({"output_router_logits": True} if name in BALANCED else {})


def _compared(rank: int, name: str, placement: Placement, plan: Any, sbp: Any) -> Any:
    wanted = step(*_made(name))
    model, inputs = _made(name)
    consistent.parallelize(model, placement, plan)
    given = {
        key: consistent.distribute(x, placement, sbp) if isinstance(x, torch.Tensor) else x
        for key, x in inputs.items()
    }
    with consistent.plain_may_differ():
        return worst(step(model, given), wanted)


@pytest.mark.parametrize(("name", "ranks"), LINES)
def test_experts_on_the_ranks_of_the_batch(name: str, ranks: int) -> None:
    line = Placement("cpu", range(ranks))
    for where, error in pool(ranks).run(_compared, name, line, "zero3+expert", S(0)):
        assert error < allowed(name), (where, error)


@pytest.mark.parametrize("name", GRIDS)
def test_experts_on_one_of_the_axes_of_the_batch(name: str) -> None:
    grid = Placement("cpu", GRID, axes=("dp", "ep"))
    plan = {"dp": "zero3", "ep": "expert"}
    for sbp in ((S(0), S(0)), (S(0), B)) if ALL else ((S(0), S(0)),):
        for where, error in pool(4).run(_compared, name, grid, plan, sbp):
            assert error < allowed(name), (where, error)


@pytest.mark.parametrize("name", GRIDS)
def test_experts_that_tensor_splits_inside(name: str) -> None:
    grid = Placement("cpu", GRID, axes=("ep", "tp"))
    plan = {"ep": "zero3+expert", "tp": "tensor"}
    for where, error in pool(4).run(_compared, name, grid, plan, (S(0), B)):
        assert error < allowed(name), (where, error)


def _list_of(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model whose experts are a dict of modules."""
    import transformers

    off: dict[str, Any] = dict.fromkeys(NO_DROPOUT, 0.0)
    made: Any = getattr(transformers, f"{name}Config")
    if name == "SwitchTransformers":
        config = made(
            vocab_size=96, d_model=24, d_kv=4, d_ff=36, num_layers=2, num_heads=4, num_experts=7,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
            dropout_rate=0.0,
        )  # fmt: skip
    else:
        config = made(
            vocab_size=96, d_model=24, encoder_layers=1, decoder_layers=1, num_experts=7,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=36,
            decoder_ffn_dim=36, encoder_sparse_step=1, decoder_sparse_step=1, **off,
        )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model.eval(), {"input_ids": tokens(), "labels": tokens(3)}


def _compared_list(rank: int, name: str) -> tuple[Any, int]:
    wanted = step(*_list_of(name))
    model, inputs = _list_of(name)
    line = Placement.all("cpu")
    consistent.parallelize(model, line, "zero3+expert")
    given = {key: consistent.distribute(x, line, S(0)) for key, x in inputs.items()}
    with consistent.plain_may_differ(), consistent.report() as report:
        found = step(model, given)
    return worst(found, wanted), sum(report.rows_of_experts.values())


@pytest.mark.parametrize("name", ["SwitchTransformers", "NllbMoe"][: 2 if ALL else 1])
def test_experts_that_are_a_dict_of_modules(name: str) -> None:
    for (where, error), rows in pool(3).run(_compared_list, name):
        assert error < 1e-5, (where, error)
        assert rows > 0
