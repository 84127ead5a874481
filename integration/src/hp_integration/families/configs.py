"""A tiny configuration for every causal language model family that transformers has.

Sizes are set under whatever names a family gives them, nested text configurations included, so
that two layers with four heads show every kind of block a family has. Nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCABULARY = 128

# What a family may call a size, and the value it gets.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "seq_length": 64,
    "max_seq_len": 64,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "n_inner": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "ffn_hidden_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 4,
    "attention_window_size": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "rotary_dim": 8,
    "n_groups": 1,
    "chunk_size": 4,
    "conv_kernel": 4,
    "lru_width": 64,
    "num_nextn_predict_layers": 0,
    "use_cache": False,
}
# Taken as the family has it in these configurations: vision and audio towers are not judged.
TOWERS = ("vision", "audio", "vae", "vq", "codec", "qformer", "depth", "text_encoder")
RANDOM = ("dropout", "pdrop", "drop_rate", "dropout_rate", "layerdrop", "jitter", "drop_prob")
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 3}
KEPT_IF_NONE = ("n_inner",)
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
MOST_LAYERS = 5

# What the generic sizes do not settle, by family; each with what it is for.
# Not judged: pretrained towers of a hundred million parameters around a decoder that another
# family of this list has, or nothing to call as a causal language model by itself.
HEAVY = (
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_text",
    "git",
    "got_ocr2",
    "moss_transcribe_diarize",
    "phi4_multimodal",
    "roc_bert",
    "xlm",
    "musicgen",
    "musicgen_melody",
    "inkling2_loop_text",
    "inkling2_text",
)

SPECIAL: dict[str, dict[str, Any]] = {
    # inner sizes that must fit one another
    "falcon_mamba": {"intermediate_size": 128},
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    # sizes that a family leaves to its checkpoints
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "local_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "attention_head_size": 16,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "intermediate_size": [96, 96],
        "laurel_rank": 8,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "longcat_flash": {"head_dim": 8},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
}


def families() -> tuple[str, ...]:
    """The model types that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(family: str, **changes: Any) -> Any:
    """The family's configuration with tiny sizes and nothing random.

    Raises:
        ValueError: transformers refuses these sizes for the family, or knows no such family.
    """
    from transformers import AutoConfig

    plain = AutoConfig.for_model(family)
    own = {**SPECIAL.get(family, {}), **changes}
    wanted = {**SIZES, **own}
    values = _changes(plain.to_dict(), {**_tiny(plain.to_dict(), wanted), **own})
    values.pop("model_type", None)
    config = AutoConfig.for_model(family, **values)
    for part in _parts(config):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
        for name in RANDOM:
            for key in [key for key in vars(part) if name in key]:
                if isinstance(getattr(part, key), int | float):
                    setattr(part, key, type(getattr(part, key))(0))
    return config


def tiny_model(family: str, device: str = "cpu", **changes: Any) -> nn.Module:
    """The family's causal language model with a tiny configuration, in fp32."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return made


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights far from their initial values, so that no term of the forward hides."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.mul_(0.9 + 0.2 * torch.rand(parameter.shape, generator=generator))
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)


def _changes(values: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What differs; a nested configuration is given whole, since it starts from nothing."""
    kept = {}
    for key, value in found.items():
        old = values.get(key)
        if value != old:
            kept[key] = value
        if isinstance(old, dict) and isinstance(value, dict) and value != old:
            kept[key] = _changes(old, value)
            if "model_type" in old:
                kept[key]["model_type"] = old["model_type"]
    return kept


def _tiny(values: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    found = copy.copy(values)
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config"):
            if not any(tower in key for tower in TOWERS):
                found[key] = _tiny(value, wanted)
        elif key in wanted and (value is not None or key in KEPT_IF_NONE):
            found[key] = wanted[key]
        elif key in TOKENS:
            found[key] = TOKENS[key] if isinstance(value, int) else value
    if isinstance(values.get("qk_rope_head_dim"), int) and "head_dim" in values:
        found["head_dim"] = values["head_dim"]  # MLA models derive it
    if "kv_lora_rank" in values and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return _chosen_layers(values, found)


def _chosen_layers(values: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One layer of every kind that the family's lists by layer name, two at least."""
    depths = [values[name] for name in DEPTHS if isinstance(values.get(name), int)]
    if not depths:
        return found
    by_layer = {
        key: value
        for key, value in values.items()
        if isinstance(value, list) and len(value) == depths[0] and not key.endswith("_ids")
    }
    if not by_layer:
        return found
    kinds = list(zip(*(map(str, value) for value in by_layer.values())))
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if len(chosen) == 1:
        chosen.append(depths[0] - 1)
    chosen = chosen[:MOST_LAYERS]
    for key, value in by_layer.items():
        found[key] = [value[index] for index in chosen]
    own = values.get("per_layer_config")
    if isinstance(own, dict):
        found["per_layer_config"] = {
            chosen.index(int(layer)): part for layer, part in own.items() if int(layer) in chosen
        }
    for name in DEPTHS:
        if name in values:
            found[name] = len(chosen)
    return found


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)
