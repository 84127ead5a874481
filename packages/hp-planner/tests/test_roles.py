"""Roles: proposed by names, confirmed by types, shapes and config."""

import pytest
import torch
from planner_models import model
from torch import nn

from hp_planner.graph import read_module
from hp_planner.roles import Role
from hp_planner.rules import classify_roles


def roles(made):
    return {a.name: a for a in classify_roles(read_module(made))}


def test_every_parameter_of_a_moe_model_with_a_dense_layer_has_its_role():
    found = {name: a.label for name, a in roles(model("qwen3_moe", mlp_only_layers=[1])).items()}
    layer = {
        "self_attn.q_proj.weight": "query_projection",
        "self_attn.k_proj.weight": "key_projection",
        "self_attn.v_proj.weight": "value_projection",
        "self_attn.o_proj.weight": "attention_output",
        "self_attn.q_norm.weight": "head_norm",
        "self_attn.k_norm.weight": "head_norm",
        "input_layernorm.weight": "norm",
        "post_attention_layernorm.weight": "norm",
    }
    moe = {
        "mlp.gate.weight": "router",
        "mlp.experts.gate_up_proj": "expert_gate_up",
        "mlp.experts.down_proj": "expert_down",
    }
    dense = {
        "mlp.gate_proj.weight": "gate_projection",
        "mlp.up_proj.weight": "up_projection",
        "mlp.down_proj.weight": "down_projection",
    }
    expected = {
        "model.embed_tokens.weight": "embedding",
        "model.norm.weight": "norm",
        "lm_head.weight": "head",
    }
    expected |= {f"model.layers.0.{name}": role for name, role in {**layer, **moe}.items()}
    expected |= {f"model.layers.1.{name}": role for name, role in {**layer, **dense}.items()}
    assert found == expected


def test_a_bias_has_the_role_of_its_weight():
    found = roles(model("qwen2"))
    assert found["model.layers.0.self_attn.k_proj.bias"].label == "key_projection_bias"


def test_a_norm_over_all_heads_is_no_head_norm():
    made = model("qwen3")
    made.model.layers[0].self_attn.q_norm.weight = nn.Parameter(torch.empty(64, device="meta"))
    found = roles(made)["model.layers.0.self_attn.q_norm.weight"]
    assert found.role is Role.NORM


@pytest.mark.parametrize(
    ("family", "name", "role"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", Role.FUSED_QKV),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", Role.FUSED_QKV),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", Role.UP),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", Role.ATTENTION_OUTPUT),
        ("gpt2", "transformer.wpe.weight", Role.POSITION),
        ("glm", "model.layers.0.mlp.gate_up_proj.weight", Role.FUSED_GATE_UP),
        ("gpt_oss", "model.layers.0.self_attn.sinks", Role.SINK),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", Role.EXPERT_BIAS),
        ("afmoe", "model.layers.0.self_attn.gate_proj.weight", Role.ATTENTION_GATE),
        ("olmo2", "model.layers.0.self_attn.q_norm.weight", Role.NORM),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", Role.KEY_VALUE_UP),
        ("deepseek_v3", "model.layers.0.self_attn.q_a_layernorm.weight", Role.LATENT_NORM),
        ("mamba", "backbone.layers.0.mixer.A_log", Role.STATE_SPACE),
        ("apertus", "model.layers.0.mlp.act_fn.alpha_p", Role.ACTIVATION),
    ],
)
def test_roles_beyond_the_dense_decoder(family, name, role):
    assert roles(model(family))[name].role is role


def test_a_renamed_parameter_of_a_state_space_block_is_unknown():
    made = model("mamba")
    mixer = made.backbone.layers[0].mixer
    mixer.decay = mixer.A_log
    del mixer.A_log
    assert roles(made)["backbone.layers.0.mixer.decay"].role is Role.UNKNOWN


def test_a_linear_with_a_forward_of_its_own_is_no_projection():
    class Transposed(nn.Linear):
        def forward(self, input):
            return input @ self.weight

    made = model("llama", intermediate_size=64)
    made.model.layers[0].mlp.up_proj = Transposed(64, 64, bias=False, device="meta")
    found = roles(made)["model.layers.0.mlp.up_proj.weight"]
    assert found.role is Role.UNKNOWN
    assert "not torch.nn.Linear's" in found.reason


def test_interleaved_or_transposed_experts_are_not_planned_as_halves():
    made = model("qwen3_moe")
    made.model.layers[0].mlp.experts.is_concatenated = False
    found = roles(made)
    assert found["model.layers.0.mlp.experts.gate_up_proj"].role is Role.UNSUPPORTED
    assert "order of gate and up" in found["model.layers.0.mlp.experts.gate_up_proj"].reason
    assert found["model.layers.1.mlp.experts.gate_up_proj"].role is Role.EXPERT_GATE_UP


@pytest.mark.parametrize("intermediate", [32, 64, 128])
def test_the_two_expert_shapes_tell_the_orientation_even_where_one_is_square(intermediate):
    made = model("qwen3_moe", moe_intermediate_size=intermediate)
    experts = made.model.layers[0].mlp.experts
    assert roles(made)["model.layers.0.mlp.experts.down_proj"].role is Role.EXPERT_DOWN
    for name in ("gate_up_proj", "down_proj"):
        swapped = getattr(experts, name).transpose(1, 2).contiguous()
        setattr(experts, name, nn.Parameter(swapped))
    assert roles(made)["model.layers.0.mlp.experts.gate_up_proj"].role is Role.UNSUPPORTED


def test_a_gate_beside_experts_needs_one_row_per_expert():
    made = model("qwen3_moe")
    made.model.layers[0].mlp.gate.weight = nn.Parameter(torch.empty(5, 64, device="meta"))
    found = roles(made)["model.layers.0.mlp.gate.weight"]
    assert found.role is Role.UNKNOWN
    assert "[experts, hidden] is [4, 64]" in found.reason


def test_a_batch_norm_is_no_row_norm():
    made = model("llama")
    made.model.norm = nn.BatchNorm1d(64, device="meta")
    assert roles(made)["model.norm.weight"].role is Role.UNKNOWN
