"""Expert parallelism in plans."""

import pytest
import torch
from attrs import evolve
from planner_models import model
from torch.distributed.tensor import Partial, Shard

from hp_dtensor.meta import validate_on_meta
from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import Contract, LocalAttribute, RegionKind
from hp_planner import LintError, lint, plan

EXPERTS = "model.layers.0.mlp.experts"


def test_experts_are_cut_by_expert_and_all_else_averages_over_the_batches():
    made = plan(model("qwen3_moe"), {"ep": 2})
    for spec in made.parameters:
        if ".experts." in spec.name:
            assert spec.contract == Contract({"ep": Shard(0)}), spec.name
        else:
            assert spec.contract == Contract({}, {"ep": Partial("avg")}), spec.name


def test_the_experts_are_an_opaque_region_that_dispatches():
    spec = plan(model("qwen3_moe"), {"ep": 2}).boundary(EXPERTS)
    assert spec.region.kind is RegionKind.OPAQUE
    assert spec.region.function == "hp_integration.regions:expert_parallel"
    assert [tensor.where for tensor in spec.inputs] == [
        "hidden_states",
        "top_k_index",
        "top_k_weights",
    ]
    assert spec.localize == (LocalAttribute("num_experts", "ep", 4),)


def test_with_tensor_parallelism_both_cuts_are_there():
    made = plan(model("qwen3_moe"), {"ep": 2, "tp": 2})
    fused = made.parameter(f"{EXPERTS}.gate_up_proj").contract
    assert fused == Contract({"ep": Shard(0), "tp": SectionedShard(1, (32, 32))})
    norm = made.parameter("model.norm.weight").contract
    assert norm == Contract({}, {"ep": Partial("avg"), "tp": Partial()})
    assert made.boundary(EXPERTS).inputs[0].inside == Contract({}, {"tp": Partial()})


def test_one_rank_of_the_axis_changes_nothing():
    made = plan(model("qwen3_moe"), {"ep": 1, "tp": 2})
    assert all("ep" not in spec.contract.axes() for spec in made.parameters)
    assert not made.boundary(EXPERTS).region.function


def test_a_block_left_whole_keeps_its_experts_on_every_rank():
    made = plan(model("qwen3_moe"), {"ep": 2}, overrides={"model.layers.0.mlp": "none"})
    assert made.parameter(f"{EXPERTS}.down_proj").contract == Contract({}, {"ep": Partial("avg")})
    other = "model.layers.1.mlp.experts"
    assert made.parameter(f"{other}.down_proj").contract == Contract({"ep": Shard(0)})


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"dp_shard": 2}])
def test_whole_experts_are_a_region_which_runs_nowhere_without_values(mesh):
    tiny = model("qwen3_moe")
    made = plan(tiny, mesh)
    assert [spec.module for spec in made.boundaries] == [EXPERTS, EXPERTS.replace("0", "1")]
    assert made.boundary(EXPERTS).region.kind is RegionKind.OPAQUE
    ids = torch.zeros(2, 8, dtype=torch.long)
    assert validate_on_meta(tiny, made, {"input_ids": ids, "use_cache": False}).unreached == ()
    with pytest.raises(RuntimeError, match="BF16"):
        validate_on_meta(tiny, evolve(made, boundaries=()), {"input_ids": ids, "use_cache": False})


@pytest.mark.parametrize(
    ("family", "changes", "overrides", "text"),
    [
        ("qwen3", {}, None, "fused experts to share among ep=2"),
        ("qwen3_moe", {"num_experts": 3}, None, "an ep that divides 3"),
        ("qwen3_moe", {}, {"*.mlp": "none"}, "only blocks that are left whole"),
    ],
)
def test_what_the_axis_cannot_share_is_refused(family, changes, overrides, text):
    with pytest.raises(LintError, match=text):
        plan(model(family, **changes), {"ep": 2}, overrides=overrides)


def test_a_plan_with_the_axis_is_linted_again_from_its_yaml():
    made, source = plan(model("qwen3_moe"), {"ep": 2, "tp": 2}), model("qwen3_moe")
    assert lint(source, type(made).from_yaml(made.to_yaml())) == ()
