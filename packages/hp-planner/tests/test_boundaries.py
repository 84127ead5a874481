"""Groups of parameters, and the kinds of their modules."""

import pytest
from planner_models import model
from torch import nn

from hp_dtensor.plan import BoundaryKind
from hp_planner.boundaries import group_boundaries, infer_boundary_types
from hp_planner.graph import read_module
from hp_planner.manners import Manner
from hp_planner.rules import classify_roles


def groups_of(made):
    graph = read_module(made)
    return graph, group_boundaries(graph, classify_roles(graph))


def boundaries_of(made):
    return {b.module: b for b in infer_boundary_types(*groups_of(made))}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt2", "gpt_oss"])
def test_every_name_of_every_parameter_is_in_one_group(family):
    graph, groups = groups_of(model(family))
    members = [member.name for group in groups for member in group.members]
    assert sorted(members) == sorted(p.name for p in graph.parameters)


def test_kinds_and_homes_follow_the_structure():
    found = boundaries_of(model("qwen2_moe"))
    expected = {
        "": (BoundaryKind.MODEL, None),
        "model.embed_tokens": (BoundaryKind.EMBEDDING, ""),
        "model.layers.1": (BoundaryKind.LAYER, ""),
        "model.layers.1.self_attn": (BoundaryKind.ATTENTION, "model.layers.1"),
        "model.layers.1.mlp": (BoundaryKind.MOE, "model.layers.1"),
        "model.layers.1.mlp.experts": (BoundaryKind.EXPERTS, "model.layers.1.mlp"),
        "model.layers.1.mlp.shared_expert": (BoundaryKind.MLP, "model.layers.1.mlp"),
        "model.layers.1.input_layernorm": (BoundaryKind.NORM, "model.layers.1"),
        "model.norm": (BoundaryKind.NORM, ""),
        "lm_head": (BoundaryKind.HEAD, ""),
    }
    assert {name: (found[name].kind, found[name].home) for name in expected} == expected
    assert not [b.module for b in found.values() if b.problem]


def test_an_mlp_in_the_layer_itself_keeps_the_hidden_states_whole():
    assert "XGLMDecoderLayer" in boundaries_of(model("xglm"))[""].problem


def test_layers_in_two_lists_keep_the_hidden_states_whole():
    made = model("llama")
    made.model.more = nn.ModuleList([type(made.model.layers[1])(made.config, 1)])
    assert "several lists" in boundaries_of(made)[""].problem


@pytest.mark.parametrize(
    ("family", "module", "manner", "reason"),
    [
        ("llama", "model.layers.0.self_attn", Manner.SHARDED, ""),
        ("deepseek_v3", "model.layers.0.self_attn", Manner.SHARDED, ""),
        ("gpt_oss", "model.layers.0.self_attn", Manner.SHARDED, ""),
        ("apertus", "model.layers.0.mlp", Manner.SHARDED, ""),
        ("glm", "model.layers.0.mlp", Manner.SHARDED, ""),
        ("phi3", "model.layers.0.self_attn", Manner.SHARDED, ""),
        ("gpt_neox", "gpt_neox.layers.0.attention", Manner.SHARDED, ""),
        ("codegen", "transformer.h.0.attn", Manner.BY_LINEAR, "the order of q, k and v"),
        ("gpt_oss", "model.layers.0.mlp.experts", Manner.SHARDED, ""),
        ("qwen3_next", "model.layers.0.linear_attn", Manner.BY_LINEAR, "conv1d"),
        ("mamba", "backbone.layers.0.mixer", Manner.BY_LINEAR, "without calling its layer"),
    ],
)
def test_a_block_is_sharded_as_one_where_its_code_is_known(family, module, manner, reason):
    changes = {"num_hidden_layers": 4} if family == "qwen3_next" else {}
    found = boundaries_of(model(family, **changes))[module]
    assert found.manner is manner
    assert reason in found.problem
