"""The planner's placements beside those of transformers' own tensor-parallel plans."""

from collections import Counter

import pytest
from attrs import evolve
from torch.distributed.tensor import Shard

import hp_planner
from hp_dtensor.plan import Contract
from hp_integration.families.configs import HEAVY, families, tiny_model
from hp_integration.families.structure import Disagreement, compared, disagreements
from hp_planner import PlanError


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "aria_text", "gpt_neox", "olmo2", "phi3", "qwen3_next"]
)
def test_placements_agree_with_the_plan_of_transformers(family):
    model = tiny_model(family, "meta")
    plan = hp_planner.plan(model, {"tp": 2})
    assert compared(model, plan)
    assert disagreements(model, plan) == Counter()


# Disagreements with a reason, by family: what the plan does instead gives right values.
EXPLAINED = {
    "llama4": "experts that take one batch of tokens each, scaled before them: left whole",
}


@pytest.mark.slow
def test_no_family_disagrees_without_a_reason():
    found, parameters = {}, 0
    for family in families():
        if family in HEAVY:
            continue
        try:
            model = tiny_model(family, "meta")
        except Exception:  # whatever transformers says about tiny sizes
            continue
        try:
            plan = hp_planner.plan(model, {"tp": 2})
        except PlanError:
            continue
        parameters += compared(model, plan).total()
        if differing := disagreements(model, plan):
            found[family] = differing
    assert found.keys() == EXPLAINED.keys(), found
    assert parameters > 900


def test_a_replicated_projection_is_a_disagreement():
    model = tiny_model("llama", "meta")
    plan = hp_planner.plan(model, {"tp": 2})
    specs = [
        evolve(s, contract=Contract()) if s.name.endswith("q_proj.weight") else s
        for s in plan.parameters
    ]
    found = disagreements(model, evolve(plan, parameters=tuple(specs)))
    assert found == Counter({Disagreement("query_projection", "colwise", "R"): 2})


def test_halves_of_experts_that_are_cut_as_one_are_a_disagreement():
    model = tiny_model("qwen3_moe", "meta")
    plan = hp_planner.plan(model, {"tp": 2})
    assert compared(model, plan)["expert_gate_up"] == 2
    specs = [
        evolve(s, contract=Contract({"tp": Shard(1)})) if s.role == "expert_gate_up" else s
        for s in plan.parameters
    ]
    found = disagreements(model, evolve(plan, parameters=tuple(specs)))
    assert found == Counter({Disagreement("expert_gate_up", "packed_colwise", "S(1)"): 2})
