"""Overrides over a derived plan."""

import pytest
import torch
from planner_models import model
from torch import nn
from torch.distributed.tensor import Partial, Shard

from hp_dtensor.plan import BoundaryKind, Contract
from hp_planner import LintError, PlanError, plan

R = Contract()
MESH = {"tp": 2}
STREAM = Contract({"tp": Shard(1)})


def contracts(made, name):
    return {
        spec.name.removeprefix(name + "."): spec.contract
        for spec in made.parameters
        if spec.name.startswith(name + ".")
    }


def ends(made, module):
    spec = made.boundary(module)
    return (
        spec.inputs[0].outside,
        spec.inputs[0].inside,
        spec.outputs[0].inside,
        spec.outputs[0].outside,
    )


def test_none_on_a_block_leaves_it_whole_and_gathers_around_it():
    made = plan(model("qwen3"), MESH, overrides={"model.layers.1.mlp": "none"})
    assert set(contracts(made, "model.layers.1.mlp").values()) == {R}
    assert ends(made, "model.layers.1.mlp") == (STREAM, R, R, STREAM)
    assert contracts(made, "model.layers.0.mlp")["up_proj.weight"] == Contract({"tp": Shard(0)})


def test_none_on_a_moe_block_covers_its_experts():
    made = plan(model("qwen3_moe"), MESH, overrides={"model.layers.0.mlp": "none"})
    assert set(contracts(made, "model.layers.0.mlp").values()) == {R}
    spec = made.boundary("model.layers.0.mlp.experts")
    assert {tensor.inside for tensor in (*spec.inputs, *spec.outputs)} == {R}


def test_none_on_the_head_makes_the_final_norm_hand_on_a_whole_gradient():
    made = plan(model("qwen3"), MESH, overrides={"lm_head": "none"})
    assert ends(made, "lm_head") == (R, R, R, R)
    assert made.boundary("model.norm").outputs[0].outside == R
    assert made.parameter("lm_head.weight").contract == R


def test_none_on_a_layer_covers_everything_in_it():
    made = plan(model("qwen3"), MESH, overrides={"model.layers.0": "none"})
    assert set(contracts(made, "model.layers.0").values()) == {R}
    assert ends(made, "model.layers.0") == (R, R, R, STREAM)
    assert not [b for b in made.boundaries if b.module.startswith("model.layers.0.")]


def test_none_on_the_weight_of_a_single_weight_boundary_means_the_boundary():
    by_module = plan(model("qwen3"), MESH, overrides={"model.embed_tokens": "none"})
    by_weight = plan(model("qwen3"), MESH, overrides={"model.embed_tokens.weight": "none"})
    assert by_weight.boundaries == by_module.boundaries
    assert ends(by_module, "model.embed_tokens") == (R, R, R, R)


def test_an_exact_name_beats_a_glob_wherever_it_stands():
    for order in (1, -1):
        entries = [("*.mlp", "none"), ("model.layers.0.mlp", "auto")][::order]
        made = plan(model("qwen3"), MESH, overrides=dict(entries))
        assert made.parameter("model.layers.0.mlp.up_proj.weight").contract != R
        assert made.parameter("model.layers.1.mlp.up_proj.weight").contract == R


def test_among_globs_the_first_whose_condition_holds_wins():
    overrides = {
        "*.0.mlp": {"when": {"axis": "tp", "min": 4}, "use": "none"},
        "*layers.0.mlp": "auto",
        "*.mlp": "none",
    }
    made = plan(model("qwen3"), MESH, overrides=overrides)
    assert made.parameter("model.layers.0.mlp.up_proj.weight").contract != R
    assert made.parameter("model.layers.1.mlp.up_proj.weight").contract == R


@pytest.mark.parametrize(
    ("when", "applies"),
    [
        ({"axis": "tp"}, True),
        ({"axis": "tp", "min": 4}, False),
        ({"axis": "ep"}, False),
        ({"config": {"model_type": "qwen3"}}, True),
        ({"config": {"hidden_size": 65}}, False),
        ({"boundary": "mlp"}, True),
        ({"boundary": "moe"}, False),
        ({"axis": "tp", "boundary": "mlp", "config": {"hidden_size": 65}}, False),
    ],
)
def test_every_condition_must_hold(when, applies):
    made = plan(model("qwen3"), MESH, overrides={"*.mlp": {"when": when, "use": "none"}})
    assert (made.parameter("model.layers.0.mlp.up_proj.weight").contract == R) is applies


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("model.layers.0.mpl", "model.layers.0.mlp"),
        ("*.q_prj.weight", "q_proj"),
        ("lm_heads", "lm_head"),
        ("model.layers.1.self_atn.k_proj", "model.layers.1.self_attn.k_proj"),
        ("layers.*.self_attention", "self_attn"),
        ("*.feed_forward", "nearest: "),
        ("nothing.at.all", "nearest: "),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_the_nearest_names(key, near):
    with pytest.raises(PlanError, match="matches no module and no parameter") as caught:
        plan(model("qwen3"), MESH, overrides={key: "none"})
    assert near in str(caught.value)


def test_names_are_checked_without_tensor_parallelism_too():
    with pytest.raises(PlanError, match="matches no module"):
        plan(model("qwen3"), {"dp_shard": 2}, overrides={"nothing.here": "none"})


def test_a_config_value_that_does_not_exist_is_an_error():
    overrides = {"*.mlp": {"when": {"config": {"hidden_sise": 64}}, "use": "none"}}
    with pytest.raises(PlanError, match=r"hidden_sise.*nearest: hidden_size"):
        plan(model("qwen3"), MESH, overrides=overrides)


DENSE_FIRST = {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 2]}


def test_a_glob_that_also_reaches_dense_blocks_stops_and_lists_them():
    """Three dense and three MoE layers, all called mlp."""
    overrides = {"*.mlp": {"when": {"axis": "ep"}, "use": "none"}}
    with pytest.raises(PlanError, match="modules of several kinds") as caught:
        plan(model("qwen3_moe", **DENSE_FIRST), MESH, overrides=overrides)
    assert "mlp: model.layers.{0..2}.mlp" in str(caught.value)
    assert "moe: model.layers.{3..5}.mlp" in str(caught.value)


def test_a_glob_that_names_the_kind_reaches_only_that_kind():
    overrides = {"*.mlp": {"when": {"axis": "tp", "boundary": "moe"}, "use": "none"}}
    made = plan(model("qwen3_moe", **DENSE_FIRST), MESH, overrides=overrides)
    whole = [
        spec.module
        for spec in made.boundaries
        if spec.kind in (BoundaryKind.MLP, BoundaryKind.MOE) and spec.inputs[0].inside == R
    ]
    assert whole == [f"model.layers.{i}.mlp" for i in (3, 4, 5)]


def test_a_glob_over_parameters_of_several_roles_stops():
    with pytest.raises(PlanError, match="parameters of several roles"):
        plan(model("qwen3"), MESH, overrides={"*proj.weight": {"tp": "R"}})


def test_a_part_of_a_block_cannot_be_left_whole_alone():
    with pytest.raises(PlanError, match=r"use none on model\.layers\.0\.mlp"):
        plan(model("qwen3"), MESH, overrides={"model.layers.0.mlp.up_proj": "none"})
    with pytest.raises(LintError, match="as its boundary"):
        plan(model("qwen3"), MESH, overrides={"model.layers.0.mlp.up_proj.weight": "none"})


def test_a_module_that_holds_boundaries_cannot_be_left_whole():
    with pytest.raises(PlanError, match="holds several boundaries"):
        plan(model("qwen3"), MESH, overrides={"model": "none"})


def test_placements_on_a_module_are_refused():
    with pytest.raises(PlanError, match="placements belong to parameters"):
        plan(model("qwen3"), MESH, overrides={"model.layers.0.mlp": {"tp": "S(0)"}})


def scaled():
    made = model("qwen3")
    for layer in made.model.layers:
        layer.scale = nn.Parameter(torch.ones(64, device="meta"))
    return made


def test_an_unknown_parameter_needs_its_gradient_said():
    with pytest.raises(PlanError, match="R grad P"):
        plan(scaled(), MESH, overrides={"model.layers.*.scale": "none"})
    made = plan(scaled(), MESH, overrides={"model.layers.*.scale": {"tp": "R grad P"}})
    spec = made.parameter("model.layers.1.scale")
    assert spec.contract == Contract({}, {"tp": Partial()})
    assert (spec.role, spec.boundary) == ("declared", "model.layers.1")
    assert "model.layers.*.scale" in spec.reason


def test_a_dim_the_parameter_lacks_is_refused():
    with pytest.raises(PlanError, match="has no such dim"):
        plan(scaled(), MESH, overrides={"model.layers.*.scale": {"tp": "S(1)"}})


def test_a_family_out_of_reach_is_planned_once_its_blocks_are_left_whole():
    overrides = {"model.layers.*.self_attn": "none", "model.layers.*.mlp": "none"}
    made = plan(model("phi3"), MESH, overrides=overrides)
    assert ends(made, "model.layers.1.self_attn") == (STREAM, R, R, STREAM)
    assert made.boundary("model.layers.1.self_attn").kind is BoundaryKind.ATTENTION
    assert made.boundary("model.layers.1.self_attn").outputs[0].where == "0"
    names = {p for p, _ in model("phi3").named_parameters()}
    assert {spec.name for spec in made.parameters} == names


def test_all_problems_of_all_overrides_are_listed_together():
    with pytest.raises(PlanError) as caught:
        plan(model("qwen3"), MESH, overrides={"nope": "none", "*.nada": "auto"})
    assert "'nope'" in str(caught.value)
    assert "'*.nada'" in str(caught.value)


def test_the_nearest_names_are_never_missing_and_layers_count_once():
    with pytest.raises(PlanError) as caught:
        plan(model("qwen3"), MESH, overrides={"zzz": "none"})
    names = str(caught.value).partition("nearest: ")[2].split(", ")
    assert len(names) == 3
    known = {name for name, _ in model("qwen3").named_modules()}
    known |= {name for name, _ in model("qwen3").named_parameters()}
    assert set(names) <= known


def test_placements_hold_for_the_axes_they_name_and_others_stay_as_derived():
    overrides = {"*.mlp.experts.down_proj": {"ep": "S(0)", "tp": "S(2)"}}
    mesh = {"ep": 2, "tp": 2}
    made = plan(model("qwen3_moe"), mesh, overrides=overrides)
    assert made.parameter("model.layers.0.mlp.experts.down_proj").contract == Contract(
        {"ep": Shard(0), "tp": Shard(2)}
    )
    norms = {"*.q_norm.weight": {"tp": "R grad P"}}
    declared = plan(model("qwen3"), {"cp": 2}, overrides=norms)
    norm = declared.parameter("model.layers.0.self_attn.q_norm.weight")
    assert norm.contract == Contract({}, {"cp": Partial()})


def test_an_override_does_not_hide_that_a_layer_cannot_have_a_part_of_the_sequence():
    with pytest.raises(PlanError, match="has parameters of its own"):
        plan(scaled(), {"cp": 2}, overrides={"model.layers.*.scale": {"tp": "R grad P"}})


def test_a_placement_on_an_axis_of_one_rank_is_passed_over():
    overrides = {"*.q_proj.weight": {"tp": "S(0)"}}
    for mesh in ({"dp_shard": 2}, {"tp": 1}, {"cp": 2}):
        made = plan(model("qwen3"), mesh, overrides=overrides)
        assert made == plan(model("qwen3"), mesh)


EXPERT_GLOB = {"*.mlp": {"when": {"axis": "ep"}, "use": "none"}}


def test_a_condition_on_the_expert_axis_does_not_widen_to_dense_blocks():
    """A rule meant for experts, on names that dense blocks share (three of six layers)."""
    with pytest.raises(PlanError, match="modules of several kinds"):
        plan(model("qwen3_moe", **DENSE_FIRST), {"ep": 2}, overrides=EXPERT_GLOB)
    named = {"*.mlp": {"when": {"axis": "ep", "boundary": "mlp"}, "use": "none"}}
    made = plan(model("qwen3_moe", **DENSE_FIRST), {"ep": 2}, overrides=named)
    cut = [s.name for s in made.parameters if "ep" in dict(s.contract.placements)]
    assert len(cut) == 6
    assert all(".experts." in name for name in cut)
