"""Groups of parameters, and the kinds of their modules."""

import pytest
import torch
from planner_models import model
from torch import nn

from hp_dtensor.plan import BoundaryKind
from hp_planner.boundaries import group_boundaries, infer_boundary_types
from hp_planner.graph import read_module
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


def test_an_mlp_in_the_layer_itself_is_a_problem():
    assert "lie in the layer itself" in boundaries_of(model("xglm"))["model.layers.0"].problem


def test_two_norms_after_the_layers_are_a_problem():
    made = model("llama")
    with torch.device("meta"):
        made.model.other_norm = nn.RMSNorm(64)
    found = boundaries_of(made)
    assert "2 boundaries of kind norm" in found["model.norm"].problem


def test_layers_in_two_lists_are_a_problem():
    made = model("llama")
    made.model.more = nn.ModuleList([made.model.layers[1]])
    assert "several lists" in boundaries_of(made)["model.layers.0"].problem
