"""`python -m hp_integration.families.scale`: how long plan and lint of real sizes take.

Every model is built on the meta device first; the seconds are those of `hp_planner.plan`, which
lints what it plans, on one core. With `--validate`, Qwen3-30B-A3B goes through validate mode on
meta tensors too, all 48 layers at tp = 4 and ep = 4, with the peak memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import torch
from torch import nn

import hp_planner

QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
# 51 layers of latent attention with 384 experts, of which a token takes 8: about 505e9 elements.
MOE_505B: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 51,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1760,
    "intermediate_size": 12288,
    "n_group": 1,
    "topk_group": 1,
}
QWEN2_5: dict[str, Any] = {"num_hidden_layers": 28, "vocab_size": 152064}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Qwen2.5-1.5B": (
        "qwen2",
        QWEN2_5
        | {
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "intermediate_size": 8960,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        {"dp_shard": 8, "tp": 2},
    ),
    "Qwen2.5-7B": (
        "qwen2",
        QWEN2_5
        | {
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
        },
        {"dp_replicate": 2, "dp_shard": 16, "tp": 4},
    ),
    "Llama-3-8B": (
        "llama",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
        {"dp_shard": 16, "tp": 8},
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "vocab_size": 151936,
        },
        {"dp_shard": 4, "ep": 4, "tp": 2},
    ),
    "Qwen3-30B-A3B": ("qwen3_moe", QWEN3_30B, {"dp_shard": 16, "ep": 4, "tp": 4}),
    "DeepSeek-V3": ("deepseek_v3", {}, {"dp_shard": 32, "ep": 16, "tp": 4}),
    # 768 ranks: experts over 16 x 12 data-parallel ranks of 192, tp = 4.
    "MoE of 505B": ("deepseek_v3", MOE_505B, {"dp_shard": 12, "ep": 16, "tp": 4}),
}


def build(family: str, sizes: dict[str, Any]) -> nn.Module:
    """The model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def _elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--validate", action="store_true", help="only Qwen3-30B-A3B, on meta")
    options = parser.parse_args(arguments)
    if options.validate:
        return _validate()
    print(f"{'model':20} {'tensors':>8} {'elements':>16} {'mesh':28} {'plan and lint':>13}")
    for name, (family, sizes, mesh) in MODELS.items():
        model = build(family, sizes)
        start = time.perf_counter()
        made = hp_planner.plan(model, mesh)
        seconds = time.perf_counter() - start
        axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        count = len(made.parameters)
        print(f"{name:20} {count:8} {_elements(model):16,} {axes:28} {seconds:11.2f} s", flush=True)
    return 0


def _validate() -> int:
    from hp_dtensor.meta import validate_on_meta

    family, sizes, _ = MODELS["Qwen3-30B-A3B"]
    model = build(family, sizes)
    start = time.perf_counter()
    made = hp_planner.plan(model, {"ep": 4, "tp": 4})
    inputs = {"input_ids": torch.zeros(1, 32, dtype=torch.long), "use_cache": False}
    print(validate_on_meta(model, made, inputs))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"48 layers at tp = 4, ep = 4: {seconds:.1f} s with the plan, peak memory {peak:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
