"""Tiny random models of many architectures of transformers, code unchanged, and plain ones.

Sizes divide by 2, 3 and 4: 12 heads (6 of keys) of 4, 96 tokens, 48 and 96 features. Dropout is
off, and values are float64, so that results are those of one process to the last digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

BATCH, LENGTH, VOCAB, DIM, HEADS, INNER, LAYERS = 12, 6, 96, 48, 12, 96, 2
Inputs = dict[str, Any]
Made = tuple[torch.nn.Module, Inputs]

# Their ops take no float64: grouped products, and masks with the smallest float32.
SINGLE = frozenset(
    "Mixtral Qwen2Moe Qwen3Moe Olmoe GraniteMoe DeepseekV3 GptOss Llama4Text XGLM".split()
)

NO_DROPOUT = """resid_pdrop embd_pdrop attn_pdrop hidden_dropout attention_dropout dropout
hidden_dropout_prob attention_probs_dropout_prob dropout_rate activation_dropout embed_dropout
classifier_dropout resid_dropout emb_pdrop attn_pdrop embedding_dropout feat_proj_dropout
final_dropout layerdrop encoder_layerdrop decoder_layerdrop drop_path_rate
attention_dropout_rate mask_time_prob mask_feature_prob summary_first_dropout
ffn_dropout classifier_dropout_prob""".split()

sizes: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=DIM, intermediate_size=INNER, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
_KEYS = dict(num_key_value_heads=6)
_MIXTURE = dict(num_experts_per_tok=2, output_router_logits=False)
_OLD: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=DIM, n_layer=LAYERS, n_head=HEADS, n_positions=64, n_inner=INNER,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_VISION: dict[str, Any] = dict(
    image_size=16, patch_size=4, num_channels=3, hidden_size=DIM, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, intermediate_size=INNER, num_labels=8,
)  # fmt: skip
_PAIR: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=DIM, encoder_layers=LAYERS, decoder_layers=LAYERS,
    encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=INNER,
    decoder_ffn_dim=INNER, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip


def made_of(
    config: str, model: str, given: dict[str, Any], inputs: Inputs, single: bool = False
) -> Made:
    """A model of transformers in float64, but where it is ``single``, with its inputs."""
    import transformers

    known = getattr(transformers, config)()
    drop = {key: 0.0 for key in NO_DROPOUT if isinstance(getattr(known, key, None), float)}
    made = getattr(transformers, config)(**{**drop, **given})
    torch.manual_seed(0)
    net = getattr(transformers, model)(made)
    return (net if single or name_of(config) in SINGLE else net.double()), inputs


def name_of(config: str) -> str:
    """``Llama`` of ``LlamaConfig``."""
    return config.removesuffix("Config")


def tokens(seed: int = 1, length: int = LENGTH) -> torch.Tensor:
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (BATCH, length), generator=generator)


def randn(*shape: int) -> torch.Tensor:
    """Normal numbers, the same each time."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _decoder(name: str, **more: Any) -> Callable[[], Made]:
    return lambda: made_of(
        f"{name}Config", f"{name}ForCausalLM", {**sizes, **more},
        {"input_ids": tokens(), "labels": tokens()},
    )  # fmt: skip


def _old(name: str, model: str = "ForCausalLM", **more: Any) -> Callable[[], Made]:
    return lambda: made_of(
        f"{name}Config", f"{name}{model}", {**_OLD, **more},
        {"input_ids": tokens(), "labels": tokens()},
    )  # fmt: skip


def _encoder(name: str, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        mask = torch.ones_like(tokens())
        mask[0, 4:] = 0
        inputs = {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}
        return made_of(f"{name}Config", f"{name}ForMaskedLM", {**sizes, **more}, inputs)

    return make


def _pair(name: str, **more: Any) -> Callable[[], Made]:
    return lambda: made_of(
        f"{name}Config", f"{name}ForConditionalGeneration", {**_PAIR, **more},
        {"input_ids": tokens(), "labels": tokens(3)},
    )  # fmt: skip


def _image(name: str, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        inputs = {"pixel_values": randn(BATCH, 3, 16, 16), "labels": tokens()[:, 0] % 8}
        return made_of(
            f"{name}Config", f"{name}ForImageClassification", {**_VISION, **more}, inputs
        )

    return make


def _clip() -> Made:
    text = dict(sizes, projection_dim=DIM)
    vision = dict(_VISION, projection_dim=DIM)
    given = dict(text_config=text, vision_config=vision, projection_dim=DIM)
    ids = tokens()
    ids[:, -1] = 2
    inputs = {"input_ids": ids, "pixel_values": randn(BATCH, 3, 16, 16), "return_loss": True}
    return made_of("CLIPConfig", "CLIPModel", given, inputs)


def _whisper() -> Made:
    given = dict(_PAIR, num_mel_bins=8, max_source_positions=10, max_target_positions=32)
    inputs = {"input_features": randn(BATCH, 8, 20), "labels": tokens()}
    return made_of("WhisperConfig", "WhisperForConditionalGeneration", given, inputs)


def _wav2vec() -> Made:
    given = dict(
        sizes, conv_dim=[24, 24], conv_kernel=[4, 4], conv_stride=[4, 4],
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_labels=8,
        classifier_proj_size=24, feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    inputs = {"input_values": randn(BATCH, 160), "labels": tokens()[:, 0] % 8}
    return made_of("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", given, inputs)


def _convnet(name: str, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        inputs = {"pixel_values": randn(BATCH, 3, 32, 32), "labels": tokens()[:, 0] % 8}
        return made_of(
            f"{name}Config", f"{name}ForImageClassification", dict(num_labels=8, **more), inputs
        )

    return make


def _llama4() -> Made:
    given = {**sizes, **_KEYS, "num_local_experts": 12, "num_experts_per_tok": 1, "head_dim": 4,
             "intermediate_size_mlp": INNER}  # fmt: skip
    inputs = {"input_ids": tokens(), "labels": tokens()}
    return made_of("Llama4TextConfig", "Llama4ForCausalLM", given, inputs)


_DEEPSEEK: dict[str, Any] = dict(
    n_routed_experts=12, n_shared_experts=1, moe_intermediate_size=24, first_k_dense_replace=1,
    num_key_value_heads=HEADS, q_lora_rank=24, kv_lora_rank=24, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=4, n_group=2, topk_group=1, num_experts_per_tok=2,
)  # fmt: skip

DECODERS: dict[str, Callable[[], Made]] = {
    "Llama": _decoder("Llama", **_KEYS),
    "Mistral": _decoder("Mistral", **_KEYS),
    "Qwen2": _decoder("Qwen2", **_KEYS),
    "Qwen3": _decoder("Qwen3", **_KEYS, head_dim=4),
    "Gemma": _decoder("Gemma", **_KEYS, head_dim=4),
    "Gemma2": _decoder("Gemma2", **_KEYS, head_dim=4, query_pre_attn_scalar=4),
    "Phi": _decoder("Phi"),
    "Phi3": _decoder("Phi3", **_KEYS),
    "StableLm": _decoder("StableLm", **_KEYS),
    "Starcoder2": _decoder("Starcoder2", **_KEYS),
    "Cohere": _decoder("Cohere", **_KEYS),
    "Olmo": _decoder("Olmo", **_KEYS),
    "Olmo2": _decoder("Olmo2", **_KEYS),
    "Granite": _decoder("Granite", **_KEYS),
    "Nemotron": _decoder("Nemotron", **_KEYS),
    "GPTNeoX": _decoder("GPTNeoX"),
    "GPT2": _old("GPT2", "LMHeadModel"),
    "GPTJ": _old("GPTJ", rotary_dim=4),
    "GPTBigCode": _old("GPTBigCode"),
    "CodeGen": _old("CodeGen", rotary_dim=4, n_head=12, n_ctx=64),
    "Bloom": _old("Bloom", hidden_size=DIM),
    "Falcon": _decoder("Falcon", new_decoder_architecture=False, multi_query=False),
    "Mpt": lambda: made_of(
        "MptConfig", "MptForCausalLM",
        dict(vocab_size=VOCAB, d_model=DIM, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64),
        {"input_ids": tokens(), "labels": tokens()},
    ),
    "OPT": _decoder("OPT", ffn_dim=INNER, word_embed_proj_dim=DIM, max_position_embeddings=64),
    "BioGpt": _decoder("BioGpt"),
    "XGLM": _decoder("XGLM", d_model=DIM, num_layers=LAYERS, attention_heads=HEADS, ffn_dim=INNER),
}  # fmt: skip
MIXTURES: dict[str, Callable[[], Made]] = {
    "Mixtral": _decoder("Mixtral", **_KEYS, **_MIXTURE, num_local_experts=12),
    "Qwen2Moe": _decoder(
        "Qwen2Moe", **_KEYS, **_MIXTURE, num_experts=12, moe_intermediate_size=24,
        shared_expert_intermediate_size=INNER, decoder_sparse_step=1,
    ),
    "Qwen3Moe": _decoder(
        "Qwen3Moe", **_KEYS, **_MIXTURE, num_experts=12, moe_intermediate_size=24, head_dim=4,
    ),
    "Olmoe": _decoder("Olmoe", **_KEYS, **_MIXTURE, num_experts=12),
    "GraniteMoe": _decoder("GraniteMoe", **_KEYS, num_local_experts=12, num_experts_per_tok=2),
    "DeepseekV3": _decoder("DeepseekV3", **_DEEPSEEK),
    "GptOss": _decoder(
        "GptOss", **_KEYS, **_MIXTURE, num_local_experts=12, head_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "Llama4Text": _llama4,
}  # fmt: skip
STATE_SPACE: dict[str, Callable[[], Made]] = {
    "Mamba": _decoder("Mamba", state_size=4, conv_kernel=2),
    "Mamba2": _decoder(
        "Mamba2", state_size=4, num_heads=12, head_dim=8, expand=2, n_groups=2, chunk_size=4
    ),
    "FalconMamba": _decoder("FalconMamba", state_size=4, conv_kernel=2),
}
ENCODERS: dict[str, Callable[[], Made]] = {
    "Bert": _encoder("Bert"),
    "Roberta": _encoder("Roberta"),
    "Electra": _encoder("Electra", embedding_size=DIM),
    "Albert": _encoder("Albert", embedding_size=24),
    "MPNet": _encoder("MPNet"),
    "DistilBert": _encoder("DistilBert", dim=DIM, n_heads=HEADS, n_layers=LAYERS, hidden_dim=INNER),
    "ModernBert": _encoder("ModernBert", global_attn_every_n_layers=2, local_attention=4),
}
PAIRS: dict[str, Callable[[], Made]] = {
    "T5": lambda: made_of(
        "T5Config", "T5ForConditionalGeneration",
        dict(vocab_size=VOCAB, d_model=DIM, d_kv=4, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS,
             dropout_rate=0.0, decoder_start_token_id=1, pad_token_id=0),
        {"input_ids": tokens(), "labels": tokens(3)},
    ),
    "Bart": _pair("Bart"),
    "MBart": _pair("MBart"),
    "Pegasus": _pair("Pegasus"),
    "M2M100": _pair("M2M100"),
    "Blenderbot": _pair("Blenderbot"),
    "Whisper": _whisper,
}  # fmt: skip
IMAGES: dict[str, Callable[[], Made]] = {
    "ViT": _image("ViT"),
    "DeiT": _image("DeiT"),
    "Beit": _image("Beit"),
    "Dinov2": _image("Dinov2"),
    "Swin": _convnet(
        "Swin", image_size=32, patch_size=4, embed_dim=24, depths=[1, 1], num_heads=[12, 12],
        window_size=4,
    ),
    "ConvNext": _convnet("ConvNext", hidden_sizes=[12, 24], depths=[1, 1], num_stages=2),
    "ResNet": _convnet("ResNet", hidden_sizes=[12, 24], depths=[1, 1], embedding_size=12,
                       layer_type="basic"),
    "CLIP": _clip,
    "Wav2Vec2": _wav2vec,
}  # fmt: skip


class Perceptron(torch.nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [DIM, INNER, INNER, DIM, 8]
        layers: list[torch.nn.Module] = []
        for a, b in zip(sizes, sizes[1:]):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}


class Transformer(torch.nn.Module):
    """Torch's own encoder layers, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, DIM)
        layer = torch.nn.TransformerEncoderLayer(DIM, HEADS, INNER, 0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.encoder(self.embed(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def _plain(kind: type[torch.nn.Module], inputs: Inputs) -> Made:
    torch.manual_seed(0)
    return kind().double(), inputs


PLAIN: dict[str, Callable[[], Made]] = {
    "Perceptron": lambda: _plain(
        Perceptron, {"x": randn(BATCH, DIM), "labels": tokens()[:, 0] % 8}
    ),
    "Transformer": lambda: _plain(Transformer, {"input_ids": tokens(), "labels": tokens()}),
}
FAMILIES = {
    "decoder": DECODERS, "mixture": MIXTURES, "state space": STATE_SPACE, "encoder": ENCODERS,
    "encoder-decoder": PAIRS, "image, audio": IMAGES, "plain": PLAIN,
}  # fmt: skip
MODELS = {name: make for family in FAMILIES.values() for name, make in family.items()}
