"""What the forward passes of real model families call has a rule (slow: it runs the models)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from hp_dtensor.coverage import Status, status_of

FAMILIES = (
    "llama mistral qwen3 gemma2 olmo2 cohere phi phi3 gpt_neox gpt2 bloom opt stablelm apertus "
    "mixtral qwen2_moe qwen3_moe olmoe minimax_m2 gpt_oss granitemoe qwen3_next bamba jamba "
    "falcon_mamba olmo_hybrid lfm2 granitemoehybrid minicpm3 deepseek_v2"
)

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

# They take no DTensor: their results are plain until something wraps them.
CREATION = {"arange", "zeros", "ones", "full", "tensor", "empty", "_set_grad_enabled"}


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.functions.add(function)
        return function(*args, **(kwargs or {}))


def functions_called_by(family: str) -> set[Any]:
    known = AutoConfig.for_model(family).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(family, **sizes, **tokens)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(16).view(2, 8)
    with Called() as called:
        model(input_ids=ids, labels=ids, use_cache=False)
    return called.functions


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.split())
def test_every_function_that_a_family_calls_is_known(family: str) -> None:
    unknown = {
        function.__name__
        for function in functions_called_by(family)
        if function.__name__ != "__get__"
        and function.__name__ not in CREATION
        and status_of(function) in (Status.REPLICATED, Status.REFUSED)
    }
    assert unknown == set()
