"""Tiny models of transformers' other architectures: all that one set of sizes fits, from the
library's own lists. ``architectures.py`` has those that need sizes of their own.

What it does not fit is left out: models of several parts (images and texts), whose configurations
are nested, and those whose sizes depend on each other in ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.models.architectures import (
    BATCH,
    DIM,
    HEADS,
    INNER,
    LAYERS,
    VOCAB,
    Inputs,
    Made,
    made_of,
    randn,
    sizes,
    tokens,
)

_EXPERTS = 12
_SIZES: dict[str, Any] = {
    **sizes,
    **dict.fromkeys(("num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("d_model", "n_embd", "dim", "embedding_size", "lru_width"), DIM),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("ffn_dim", "d_ff", "shared_expert_intermediate_size"), INNER),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "v_head_dim", "patch_size"), DIM // HEADS),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), DIM // HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), DIM // HEADS),
    **dict.fromkeys(("state_size", "chunk_size", "sliding_window", "attention_window_size"), 4),
    **dict(attention_window=4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), HEADS // 2),
    **dict(num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1),
    **dict(moe_layer_start_index=1, num_kv_shared_layers=0, decoder_start_token_id=1),
    **dict(hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB),
    **dict(encoder_layers=LAYERS, decoder_layers=LAYERS, forced_eos_token_id=None, n_positions=64),
    **dict(encoder_attention_heads=HEADS, decoder_attention_heads=HEADS),
    **dict(encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, image_size=16, num_channels=3),
    **dict(num_labels=8),
}

# Their keys are compressed and expanded again, so that there are as many as queries.
_AS_MANY_KEYS = frozenset(
    """longcat_flash minicpm3 youtu esmc axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v32
    glm4_moe_lite glm_moe_dsa""".split()
)
# Their ops take no float64.
SINGLE = frozenset(
    """afmoe aria_text cohere2_moe deepseek_v4 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text kolibri1
    laguna mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text nemotron_h phimoe
    qwen3_5_moe_text qwen3_next solar_open mra fsmt axk1 axk2 bailing_hybrid deepseek_v2
    deepseek_v32 glm4_moe_lite glm_moe_dsa""".split()
)

# By what they compute: transformers' list of such models, and those of it that the sizes fit.
_FITTING = {
    "causal": (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        """afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid beam bert-generation big_bird
        bigbird_pegasus bitnet blenderbot-small camembert cohere2 cohere2_moe cpmant ctrl cwm
        data2vec-text deepseek_v2 deepseek_v32 deepseek_v4 diffllama doge ernie ernie4_5
        ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma3_text gemma3n_text glm glm4 glm4_moe
        glm4_moe_lite glm_moe_dsa gpt_neox_japanese granite_swa granitemoe_swa granitemoeshared
        helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text
        inkling_text internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm3 longcat_flash
        marian megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text
        ministral ministral3 modernbert-decoder moshi mvp nanochat nemotron_h olmo3 olmo_hybrid
        openai-gpt persimmon phimoe plbart qwen3_5_moe_text qwen3_5_text qwen3_next rembert
        roberta-prelayernorm roformer seed_oss smollm3 solar_open trocr vaultgemma xlm xlm-roberta
        xlm-roberta-xl youtu""",
    ),
    "masked": (
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        """big_bird camembert convbert data2vec-text deberta deberta-v2 ernie esm esmc eurobert
        flaubert fnet gte ibert jina_embeddings_v3 layoutlm longformer megatron-bert mra mvp
        nomic_bert nystromformer rembert roberta-prelayernorm roformer squeezebert tapas ultrabert
        xlm xlm-roberta xlm-roberta-xl yoso""",
    ),
    "pair": (
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        """bigbird_pegasus blenderbot-small fsmt led marian mt5 mvp nllb-moe pegasus_x plbart
        seamless_m4t seamless_m4t_v2 umt5""",
    ),
    "image": (
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        """data2vec-vision dinov2_with_registers ijepa mobilenet_v1 mobilenet_v2 mobilevit
        swiftformer vit_msn""",
    ),
    "audio": (
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        "data2vec-audio hubert unispeech unispeech-sat wav2vec2-conformer wavlm",
    ),
}


def _inputs(kind: str) -> Inputs:
    labels = tokens(3 if kind == "pair" else 1)
    if kind == "image":
        return {"pixel_values": randn(BATCH, 3, 16, 16), "labels": labels[:, 0] % 8}
    if kind == "audio":
        return {"input_values": randn(BATCH, 400), "labels": labels[:, 0] % 8}
    given = {"input_ids": tokens(), "labels": labels}
    if kind == "masked":
        given["attention_mask"] = torch.ones_like(tokens())
        given["attention_mask"][0, 4:] = 0
    return given


def _make(kind: str, key: str) -> Made:
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = CONFIG_MAPPING_NAMES[key]
    model = getattr(modeling_auto, _FITTING[kind][0])[key]
    known = getattr(transformers, config)()
    given = _known_sizes(known)
    if key in _AS_MANY_KEYS and "num_key_value_heads" in given:
        given["num_key_value_heads"] = HEADS
    inputs = _inputs(kind)
    return made_of(
        config, model if isinstance(model, str) else model[0], given, inputs, key in SINGLE
    )


def _known_sizes(known: Any) -> dict[str, Any]:
    """The sizes that a configuration has and that may be set, and a layer of each of its kinds."""
    given: dict[str, Any] = {}
    for name, size in _SIZES.items():
        attribute = getattr(type(known), name, None)
        is_computed = isinstance(attribute, property) and attribute.fset is None
        if hasattr(known, name) and not is_computed:
            if not isinstance(getattr(known, name), list | tuple):
                given[name] = size
    if kinds := list(dict.fromkeys(getattr(known, "layer_types", None) or ())):
        given["layer_types"] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in given:
                given[name] = len(given["layer_types"])
    return given


OTHERS: dict[str, Callable[[], Made]] = {
    f"{kind} {key}": partial(_make, kind, key)
    for kind, (_, keys) in _FITTING.items()
    for key in keys.split()
}
