"""What the forward passes of real model families call has a rule (slow: it runs the models)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hp_dtensor.coverage import Status, status_of

# Families of causal language models in transformers: MLA, experts, dense, fused, state spaces.
FAMILIES = """
minicpm3 youtu deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa bailing_hybrid
afmoe aria_text dots1 ernie4_5_moe exaone_moe granitemoe granitemoeshared hy_v3 mellum minimax_m2
mixtral olmoe qwen2_moe qwen3_moe solar_open gpt_oss sarvam_moe granitemoehybrid jamba qwen3_next
cohere cohere2 cohere_compass_text cwm ernie4_5 exaone gemma gemma2 gemma3_text
gemma4_unified_text gptj granite granite_swa helium internlm3 iquestcoder llama ministral
ministral3 mistral nanochat olmo2 olmo3 phi qwen2 qwen3 seed_oss smollm3 starcoder2 apertus emu3
hunyuan_v1_dense lfm2 opt stablelm glm gpt_neox phi3 bloom gpt-sw3 gpt2 gpt_bigcode olmo_hybrid
bamba falcon_mamba mamba mamba2
"""

# They take no DTensor: their results are plain until something wraps them.
CREATION = {"arange", "zeros", "ones", "full", "tensor", "empty", "eye", "_set_grad_enabled"}

# The loop over experts asks which of them have tokens: of whole tensors, or inside a region.
BY_VALUE = {"nonzero"}


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
    configs = pytest.importorskip("hp_integration.families.configs", reason="has tiny sizes")
    model = configs.tiny_model(family)
    ids = torch.arange(16).view(2, 8) % 13
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
        and function.__name__ not in CREATION | BY_VALUE
        and status_of(function) in (Status.REPLICATED, Status.REFUSED)
    }
    assert unknown == set()
