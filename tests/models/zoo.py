"""Tiny random models of the transformers library, code unchanged, and three layouts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist

import consistent
from consistent import B, S

BATCH, LENGTH, VOCAB = 6, 10, 99
Inputs = dict[str, torch.Tensor]
Made = tuple[torch.nn.Module, Inputs]


def _tokens() -> torch.Tensor:
    return torch.randint(1, VOCAB, (BATCH, LENGTH))


def llama() -> Made:
    """Grouped-query attention, RMS norm, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    ids = _tokens()
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> Made:
    """Conv1D weights (in, out), learned positions, tied embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=24,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = _tokens()
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def bert() -> Made:
    """Bidirectional, with a padding mask and ignored labels."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = _tokens()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels = ids.clone()
    labels[mask == 0] = -100
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def vit() -> Made:
    """Patch embedding by convolution, class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=3,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        num_labels=7,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images = torch.randn(BATCH, 3, 16, 16)
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(0, 7, (BATCH,)),
    }


def t5() -> Made:
    """Encoder and decoder, relative position buckets."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens()}


MODELS: dict[str, Callable[[], Made]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5": t5,
}


def _matrices(model: torch.nn.Module) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    linear = (torch.nn.Linear, Conv1D)
    return [f"{name}.weight" for name, m in model.named_modules() if isinstance(m, linear)]


def batch(model: torch.nn.Module) -> dict[str, Any]:
    """Data parallel: parameters B."""
    return {}


def sharded(model: torch.nn.Module) -> dict[str, Any]:
    """Every parameter S(0), batch split."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: S(0) for name in names}


def columns_rows(model: torch.nn.Module) -> dict[str, Any]:
    """Linear weights split by columns and rows in turn; the rest B."""
    tied = _tied(model)
    plan: dict[str, Any] = {}
    for i, name in enumerate(_matrices(model)):
        for other in tied.get(name, (name,)):
            plan.setdefault(other, S(i % 2))
    return plan


def _tied(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    by_id: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(value), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


LAYOUTS = {"batch": batch, "sharded": sharded, "columns_rows": columns_rows}


def train_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, dict[str, Any], Any]:
    """(loss, gradients, loss after one AdamW step)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(**inputs).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: None if g is None else g.detach().clone() for name, g in grads.items()}
    optimizer.step()
    return loss, kept, model(**inputs).loss


def _double(name: str) -> Made:
    """The model and its inputs in float64."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.double(), {
        k: x.double() if x.is_floating_point() else x for k, x in inputs.items()
    }


def compare(name: str, layout: str, rank: int = 0) -> dict[str, Any]:
    """One training step of a model under a layout against plain torch in this process.

    Returns the largest relative errors, and the ops that ran whole.
    """
    model, inputs = _double(name)
    model.eval()  # dropout is off in the configurations; eval only makes sure
    twin, _ = _double(name)
    twin.load_state_dict(model.state_dict())
    twin.eval()
    loss, grads, after = train_step(twin, inputs)
    placement = consistent.placement.all("cpu")
    plan = LAYOUTS[layout](model)
    consistent.parallelize(model, placement, plan)
    split = B if layout == "columns_rows" else S(0)
    placed = {k: consistent.distribute(v, placement, split) for k, v in inputs.items()}
    with consistent.report() as r:
        our_loss, our_grads, our_after = train_step(model, placed)
    errors = {"loss": _error(our_loss, loss), "after": _error(our_after, after)}
    for key, grad in grads.items():
        ours = our_grads[key]
        if (grad is None) != (ours is None):
            errors[f"grad {key}"] = float("inf")
        elif grad is not None:
            errors[f"grad {key}"] = _error(ours, grad)
    worst = max(errors, key=lambda k: errors[k])
    return {
        "errors": errors,
        "worst": (worst, errors[worst]),
        "whole": r.whole,
        "bytes": r.nbytes,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def _error(ours: Any, plain: torch.Tensor) -> float:
    """Largest difference relative to the largest element, as a gradient's small elements are
    sums that cancel."""
    value = ours.detach().full() if hasattr(ours, "full") else ours.detach()
    scale = plain.detach().abs().max().clamp_min(1e-3)
    return float((value - plain.detach()).abs().max() / scale)
