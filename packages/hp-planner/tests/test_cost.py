"""What a plan costs, worked out by hand."""

import pytest
from planner_models import model

from hp_planner import plan
from hp_planner.cost import Workload, memory, messages, totals

WORK = Workload(batch=2, sequence=8, element_size=4)
HIDDEN = 2 * 8 * 64 * 4


def of(mesh, family="llama", work=WORK, **changes):
    return totals(messages(plan(model(family, **changes), mesh), work))


def test_a_tensor_parallel_step_exchanges_whole_hidden_states():
    """Each block gathers and scatters once each way, also the final norm and the first layer."""
    found = of({"tp": 2})
    logits = 2 * 8 * 256 * 4
    assert found["tp", "all_gather"] == (11, 10 * HIDDEN + logits)
    assert found["tp", "reduce_scatter"] == (9, 9 * HIDDEN)
    # The embedding's sum, and five norms of 64 whose gradients are summands.
    assert found["tp", "all_reduce"] == (2, HIDDEN + 5 * 64 * 4)


def test_context_parallel_attention_exchanges_keys_and_values():
    found = of({"cp": 2})
    keys_and_values = 2 * 8 * 2 * 2 * 16 * 4
    assert found["cp", "all_gather"] == (4, 2 * HIDDEN + 2 * keys_and_values)
    assert found["cp", "reduce_scatter"] == (2, 2 * keys_and_values)


def test_expert_traffic_needs_the_number_of_experts_of_a_token():
    work = Workload(2, 8, 4, experts_per_token=2)
    rows = 2 * 8 * 2
    one_layer = 4 * 8 + rows * 64 * 4 * 4 + rows * 4 * 2
    assert of({"ep": 2}, "qwen3_moe", work)["ep", "all_to_all"] == (14, 2 * one_layer)
    assert ("ep", "all_to_all") not in of({"ep": 2}, "qwen3_moe")


def test_data_axes_gather_twice_and_scatter_once():
    made = plan(model("llama"), {"dp_shard": 2, "dp_replicate": 2})
    elements = sum(_numel(spec.shape) for spec in made.parameters)
    found = totals(messages(made, WORK))
    count = len(made.parameters)
    assert found["dp_shard", "all_gather"] == (2 * count, 2 * elements * 4)
    assert found["dp_shard", "reduce_scatter"] == (count, elements * 4)
    assert found["dp_replicate", "all_reduce"] == (count, elements // 2 * 4)


def _numel(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def test_axes_of_one_rank_cost_nothing():
    assert of({"tp": 1, "ep": 1, "cp": 1, "dp_shard": 1}) == {}


def test_memory_follows_the_cuts():
    whole = memory(plan(model("llama"), {"dp_shard": 1}), WORK)
    cut = memory(plan(model("llama"), {"tp": 2, "dp_shard": 2}), WORK)
    norms = 5 * 64
    elements = whole.parameters // 4
    assert cut.gathered == ((elements - norms) // 2 + norms) * 4
    assert cut.parameters == cut.gathered // 2
    assert cut.optimizer == 2 * cut.parameters
    assert cut.held == 4 * cut.parameters
    assert 0 < cut.activations < whole.activations


def test_for_all_but_experts_ranks_of_the_expert_axis_are_data_ranks():
    made = plan(model("qwen3_moe"), {"dp_shard": 2, "ep": 2})
    found = messages(made, WORK)
    assert not [m for m in found if m.phase == "settlement"]
    axes = {m.where: m.axis for m in found if m.operation == "reduce_scatter"}
    assert axes["model.layers.0.mlp.experts.down_proj"] == "dp_shard"
    assert axes["model.layers.0.self_attn.q_proj.weight"] == "dp_shard_ep"
    elements = sum(_numel(spec.shape) for spec in made.parameters)
    assert memory(made, WORK).parameters == elements // 4 * 4


def test_a_sequence_that_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match=r"dim 1 of \[2, 7, 64\] cannot be cut over tp=2"):
        of({"tp": 2}, work=Workload(2, 7))
