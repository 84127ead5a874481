"""The planner's placements beside those of transformers' own tensor-parallel plans."""

from collections import Counter

import pytest
from attrs import evolve

import hp_planner
from hp_dtensor.plan import Contract
from hp_integration.families.configs import tiny_model
from hp_integration.families.structure import Disagreement, compared, disagreements


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_neox", "olmo2", "phi3", "qwen3_next"])
def test_placements_agree_with_the_plan_of_transformers(family):
    model = tiny_model(family, "meta")
    plan = hp_planner.plan(model, {"tp": 2})
    assert compared(model, plan)
    assert disagreements(model, plan) == Counter()


def test_a_replicated_projection_is_a_disagreement():
    model = tiny_model("llama", "meta")
    plan = hp_planner.plan(model, {"tp": 2})
    specs = [
        evolve(s, contract=Contract()) if s.name.endswith("q_proj.weight") else s
        for s in plan.parameters
    ]
    found = disagreements(model, evolve(plan, parameters=tuple(specs)))
    assert found == Counter({Disagreement("query_projection", "colwise", "R"): 2})
