"""Logical matrices of model families: by role, with the shapes that separate weights would have."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hp_integration.muon_views import muon_views

SMALL = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4,
    "num_local_experts": 4, "n_layer": 1, "n_embd": 64, "n_head": 4, "q_lora_rank": 24,
    "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "first_k_dense_replace": 1, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "hidden_dropout": 0.0, "original_max_position_embeddings": 64,
    "max_position_embeddings": 64,
}  # fmt: skip


def model_of(family: str) -> torch.nn.Module:
    made = CONFIG_MAPPING[family]()
    for key, value in SMALL.items():
        if hasattr(made, key):
            setattr(made, key, value)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(made)
    return model


def shapes(family: str, *, per_head: bool = False) -> dict[str, list[tuple[int, int, int]]]:
    """(count, rows, cols) of every kind of matrices, by the parameter's last names."""
    model = model_of(family)
    found = {}
    for name, view in muon_views(model, per_head=per_head).items():
        kinds = view.kinds(tuple(model.get_parameter(name).shape), name)
        short = ".".join(name.removesuffix(".weight").split(".")[-2:])
        found[short] = [(kind.count, kind.rows, kind.cols) for kind in kinds]
    return found


def test_contiguous_query_key_value_of_unequal_sizes_are_three_matrices() -> None:
    assert shapes("phi3") == {
        "self_attn.qkv_proj": [(1, 64, 64), (1, 32, 64), (1, 32, 64)],
        "mlp.gate_up_proj": [(1, 96, 64), (1, 96, 64)],
    }


def test_a_model_in_a_wrapper_has_the_views_of_the_bare_one() -> None:
    model = model_of("phi3")
    assert muon_views(torch.nn.DataParallel(model)) == muon_views(model)


def test_query_key_value_interleaved_by_head_are_three_matrices() -> None:
    assert shapes("gpt_neox")["attention.query_key_value"] == [(1, 64, 64)] * 3


@pytest.mark.parametrize(
    ("family", "intermediate"), [("mixtral", 96), ("qwen3_moe", 48), ("aria_text", 96)]
)
def test_gate_and_up_of_every_expert_are_matrices_in_either_orientation(
    family: str, intermediate: int
) -> None:
    found = next(kinds for name, kinds in shapes(family).items() if "gate_up" in name)
    experts = found[0][0]
    assert found == [(experts, intermediate, 64)] * 2


def test_alternating_gate_and_up_columns_are_told_apart() -> None:
    assert shapes("gpt_oss")["experts.gate_up_proj"] == [(4, 96, 64)] * 2


def test_latent_projections_are_factors() -> None:
    found = shapes("deepseek_v3")
    assert found["self_attn.q_b_proj"] == [(1, 32, 24), (1, 16, 24)]
    assert found["self_attn.kv_b_proj"] == [(1, 32, 32), (1, 48, 32)]
    assert found["self_attn.kv_a_proj_with_mqa"] == [(1, 32, 64), (1, 4, 64)]


def test_plain_projections_need_a_view_only_by_head() -> None:
    assert shapes("qwen3") == {}
    assert shapes("qwen3", per_head=True) == {
        "self_attn.q_proj": [(4, 16, 64)],
        "self_attn.k_proj": [(2, 16, 64)],
        "self_attn.v_proj": [(2, 16, 64)],
    }
