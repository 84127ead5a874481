"""Which parameters of published models Muon takes, at their real sizes, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hp_muon import split_parameters

QWEN2 = {"vocab_size": 151936, "max_position_embeddings": 32768}
MODELS: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        336, 195, 30_532_122_624,
    ),
    "Qwen2.5-1.5B": (
        "qwen2",
        QWEN2 | {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        196, 142, 1_543_714_304,
    ),
    "Qwen2.5-7B": (
        "qwen2",
        QWEN2 | {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        },
        196, 143, 7_615_616_512,
    ),
    "Llama-3-8B": (
        "llama",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        },
        224, 67, 8_030_261_248,
    ),
    "DeepSeek-V3": (
        "deepseek_v3", {"num_nextn_predict_layers": 0}, 662, 247, 671_026_404_352
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_muon_takes_the_matrices_and_adamw_the_rest(name: str) -> None:
    family, sizes, muon, adamw, elements = MODELS[name]
    config = CONFIG_MAPPING[family](**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    groups = split_parameters(model)
    assert [len(group["params"]) for group in groups] == [muon, adamw]
    assert sum(p.numel() for group in groups for _, p in group["params"]) == elements
