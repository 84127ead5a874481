"""Tiny models for the planner's tests: transformers families on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def config(model_type: str, **changes: Any) -> Any:
    """A small config: the sizes the family knows, and whatever is asked for on top."""
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known and name not in changes}
    if "num_experts" in changes:
        # Two names of one number in some families; the last one given would win.
        sizes.pop("num_local_experts", None)
    made = AutoConfig.for_model(model_type, **{**sizes, **TOKENS, **changes})
    made._attn_implementation = "eager"
    return made


def model(model_type: str, device: str = "meta", **changes: Any) -> nn.Module:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config(model_type, **changes))


class ScaledLayer(LlamaDecoderLayer):
    """A layer that scales the hidden states, of which a rank has a part, by a parameter."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = super().forward(hidden_states, **kwargs) * self.scale
        return made


def scaled(**changes: Any) -> nn.Module:
    """A Llama whose layers hold a parameter that no rule knows."""
    made = model("llama", **changes)
    for layer in made.model.layers:
        layer.__class__ = ScaledLayer
        layer.scale = nn.Parameter(torch.ones(64, device="meta"))
    return made
