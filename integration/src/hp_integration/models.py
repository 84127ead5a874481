"""Causal language models of transformers with random weights that every rank builds alike.

Weights come from one seeded generator on the CPU, so they are the same on every rank and for
every mesh. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_integration.errors import InputError
from hp_planner import model_source

# Sizes of the built-in models; the vocabulary is the corpus's.
_SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": (
        "qwen3_moe",
        {
            **_SHARED,
            "intermediate_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 192,
            "norm_topk_prob": True,
        },
    ),
    "dense": ("qwen3", {**_SHARED, "intermediate_size": 384}),
    "llama": ("llama", {**_SHARED, "intermediate_size": 384}),
}


def model_config(name: str, *, vocabulary: int, config_file: Path | None = None) -> Any:
    """The transformers configuration for a built-in name, a `model_type` or a causal-LM class.

    Args:
        name: `moe`, `dense`, `llama`; a model type such as `qwen3`; or a class such as
            `LlamaForCausalLM`.
        vocabulary: number of token ids the corpus needs; a configuration file may ask for more.
        config_file: JSON in the form of a model's `config.json`; its values override.

    Raises:
        InputError: the model is unknown, or the file is unreadable or does not fit the model.
    """
    model_type, sizes = BUILT_IN[name] if name in BUILT_IN else (_model_type(name), {})
    values = {"vocab_size": vocabulary, **sizes, **_read_config(config_file)}
    values.pop("model_type", None)
    values.pop("architectures", None)
    if values["vocab_size"] < vocabulary:
        raise InputError(
            f"--config {config_file}: vocab_size is {values['vocab_size']}, the text has "
            f"{vocabulary} token ids"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # validation errors of many kinds, all about the values
        reason = " ".join(str(error).split())
        raise InputError(f"--model {name}: the configuration is not valid: {reason}") from None
    config.use_cache = False
    return config


def build_model(config: Any, *, seed: int) -> nn.Module:
    """The model of `config` in fp32 on the CPU, with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _causal_lm(config)
    model.train()
    return model


def abstract_model(config: Any) -> nn.Module:
    """The same model without values, on the meta device."""
    with torch.device("meta"):
        return _causal_lm(config)


def parameter_count(model: nn.Module) -> int:
    """Elements of all parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every decoder layer: the model's longest list of one-class modules.

    Raises:
        InputError: the model has no list of repeated modules.
    """
    lists = [
        (name, child)
        for name, child in model.named_modules()
        if isinstance(child, nn.ModuleList) and len({type(layer) for layer in child}) == 1
    ]
    if not lists:
        raise InputError(f"{type(model).__name__} has no list of decoder layers to shard")
    name, layers = max(lists, key=lambda pair: (parameter_count(pair[1]), -len(pair[0])))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def _causal_lm(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model


def _model_type(name: str) -> str:
    """The transformers model type that `name` stands for, as a type or as a class name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        found = model_source.model_type(name)
    except model_source.UsageError as error:
        raise InputError(
            f"--model {name}: unknown; give {', '.join(BUILT_IN)}, or a causal LM of transformers "
            f"by model type (qwen3) or class (Qwen3ForCausalLM): {error}"
        ) from None
    if found not in dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise InputError(f"--model {name}: {found} is no causal LM of transformers")
    return found


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return model_source.read_json(path)
    except model_source.UsageError as error:
        raise InputError(f"--config: {error}") from None
