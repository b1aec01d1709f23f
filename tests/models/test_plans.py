"""Unmodified models under each plan: loss, gradients and the loss after a step are those of one
process; and what the plans of tensor parallelism send is what Megatron counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of the transformers library")

import consistent
from consistent import Placement, S
from mirrored.transports.counting import counting
from tests.models.architectures import BATCH, DIM, LAYERS, LENGTH, MODELS
from tests.models.steps import allowed, alone, step, under, worst
from tests.ranks import ALL, on_ranks, pool

FEW = (
    "Llama",
    "GPT2",
    "Mixtral",
    "Bert",
    "T5",
    "ViT",
    "Mamba",
    "GPTNeoX",
    "DeepseekV3",
    "Transformer",
)
# (plan, ranks, whether ranks pass their part of the batch)
PLANS = [("data", 3, True), ("tensor", 3, False), ("tensor+sequence", 2, False)]
CASES = [(name, *plan) for name in (MODELS if ALL else FEW) for plan in PLANS]
CASES += [(name, "hf", 2, False) for name in ("Llama", "DeepseekV3")]
CASES += [("Mixtral", "expert", 3, False)]
CONTEXT = ("Llama", "GPT2", "Mixtral", "Bert", "T5", "Mamba") if not ALL else MODELS
CASES += [(name, "context", n, False) for name in CONTEXT for n in ((2, 3, 4) if ALL else (3,))]


def _compared(rank: int, name: str, plan: Any, part: bool) -> tuple[Any, list[str]]:
    watched, found = under(name, plan, Placement.all("cpu"), part)
    return worst(found, alone(name)), watched.report.whole


@pytest.mark.parametrize(("name", "plan", "ranks", "part"), CASES)
def test_a_step_is_that_of_one_process(name: str, plan: str, ranks: int, part: bool) -> None:
    for (where, error), whole in pool(ranks).run(_compared, name, plan, part):
        # Losses and norms of many models are float32 inside, whatever the weights are.
        assert error < allowed(name), (where, error)
        assert not whole


def _two_axes(rank: int, name: str, plan: dict[str, Any]) -> Any:
    p = Placement("cpu", [[0, 1], [2, 3]], axes=tuple(plan))
    _, found = under(name, plan, p, True)
    return worst(found, alone(name))


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_two_axes(name: str) -> None:
    for where, error in pool(4).run(_two_axes, name, {"dp": "data", "tp": "tensor"}):
        assert error < 1e-5, where


@pytest.mark.parametrize(
    "plan", [{"dp": "zero3", "cp": "context"}, {"tp": "tensor", "cp": "context"}], ids=str
)
def test_context_beside_another_plan(plan: dict[str, str]) -> None:
    for where, error in pool(4).run(_two_axes, "Llama", plan):
        assert error < 1e-5, where


# -- bytes -----------------------------------------------------------------------------------------

ACTIVATIONS = BATCH * LENGTH * DIM * 8


def _sent(rank: int, name: str, plan: str) -> tuple[dict[str, int], int]:
    """How often activations were sent in forward and backward, by the kind of call, and the bytes
    of all other calls."""
    model, inputs = MODELS[name]()
    consistent.parallelize(model.eval(), Placement.all("cpu"), plan)
    n = torch.distributed.get_world_size()
    model(**inputs)["loss"].backward()  # plain tensors are compared in the first step
    with counting() as counted:
        model(**inputs)["loss"].backward()
    whole = {"all_reduce": 2 * (n - 1) * ACTIVATIONS // n, "all_gather": (n - 1) * ACTIVATIONS // n}
    whole["all_to_all"] = whole["all_gather"]
    found = dict.fromkeys(whole, 0)
    rest = 0
    for call in counted.calls:
        if call.bytes == whole.get(call.name):
            found[call.name] += 1
        else:
            rest += call.bytes
    return found, rest


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "Phi"])
def test_tensor_sends_two_and_two_all_reduces_a_block(name: str) -> None:
    for found, rest in pool(2).run(_sent, name, "tensor"):
        # One more each way for the embedding, whose vocabulary is split.
        assert found["all_reduce"] == 4 * LAYERS + 2, found
        assert rest < ACTIVATIONS // 2, rest  # gradients of norms and biases


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX"])
def test_sequence_sends_as_much_in_halves(name: str) -> None:
    for found, rest in pool(2).run(_sent, name, "tensor+sequence"):
        assert found["all_reduce"] == 0
        assert found["all_gather"] == found["all_to_all"] == 4 * LAYERS + 2, found
        assert rest < ACTIVATIONS // 2, rest


def _exchanged(rank: int, name: str, plan: str) -> int:
    """The bytes of messages between ranks in a forward and a backward."""
    model, inputs = MODELS[name]()
    consistent.parallelize(model.eval(), Placement.all("cpu"), plan)
    with counting() as counted:
        model(**inputs)["loss"].backward()
    return sum(call.bytes for call in counted.calls if call.name == "exchange")


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_no_columns_change_places(name: str) -> None:
    # GPT2 computes q, k and v by one weight. It is split by blocks, so that each rank holds the
    # columns of its own heads of all three.
    assert pool(2).run(_exchanged, name, "tensor") == [0, 0]


def _bytes(rank: int, name: str, plan: str) -> int:
    return under(name, plan, Placement.all("cpu"), False)[0].bytes


def test_a_mixture_sends_what_its_own_plan_does() -> None:
    assert pool(2).run(_bytes, "Mixtral", "tensor") == pool(2).run(_bytes, "Mixtral", "hf")


# -- what is decided -------------------------------------------------------------------------------


def _notes(rank: int, name: str, plan: str) -> list[str]:
    model, _ = MODELS[name]()
    return consistent.plan_of(consistent.parallelize(model, Placement.all("cpu"), plan)).notes


def test_what_is_left_whole_is_said() -> None:
    (notes, *_) = pool(4).run(_notes, "Llama", "tensor")
    assert any("12 and 6 heads do not divide by 4 ranks" in note for note in notes), notes
    (notes, *_) = pool(2).run(_notes, "GPT2", "tensor")
    assert not notes


@on_ranks(2)
def test_a_word_that_is_not_known_is_an_error(rank: int) -> None:
    model, _ = MODELS["Llama"]()
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "colwize"}
    with pytest.raises(ValueError, match="'colwize' .*Did you mean 'colwise'"):
        consistent.parallelize(model, Placement.all("cpu"), "hf")
    with pytest.raises(ValueError, match="carries no plan of its own"):
        consistent.parallelize(MODELS["Bert"]()[0], Placement.all("cpu"), "hf")


@on_ranks(2)
def test_inputs_given_as_parts_train_as_one_process(rank: int) -> None:
    model, inputs = MODELS["Llama"]()
    consistent.parallelize(model.eval(), Placement.all("cpu"), inputs=S(0))
    mine = {key: x.split([7, BATCH - 7])[rank] for key, x in inputs.items()}
    where, error = worst(step(model, mine), alone("Llama"))
    assert error < 1e-5, where
