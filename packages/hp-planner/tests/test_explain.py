"""The plan in words and tables."""

import pytest
from planner_models import model

from hp_dtensor.plan import Contract, partial_sum, replicated_with_partial_gradient, sharded
from hp_planner import Workload, explain, plan
from hp_planner.explain import collectives, parameter_rows, transition_words

R, SUMMED = Contract(), replicated_with_partial_gradient("tp")
SEQUENCE, PARTIAL, LAST = sharded("tp", 1), partial_sum("tp"), sharded("tp", 2)


def test_repeated_layers_share_a_row_and_a_model_fits_a_screen():
    made = plan(model("qwen3_moe", num_hidden_layers=48), {"dp_shard": 2, "tp": 2})
    text = explain(made)
    assert "model.layers.{0..47}.self_attn.q_proj.weight" in text
    assert len(text.splitlines()) < 65
    assert max(len(line) for line in text.splitlines()) < 190


def test_every_parameter_is_in_one_row_with_role_and_reason():
    made = plan(model("qwen3", tie_word_embeddings=True), {"tp": 2})
    rows = {row[0]: row[1:] for row in parameter_rows(made)}
    assert rows["model.layers.{0..1}.self_attn.q_norm.weight"] == (
        "head_norm",
        "16",
        "R",
        "tp: P(sum)",
        "norm over head_dim inside attention",
    )
    assert "model.embed_tokens.weight (= lm_head.weight)" in rows


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (SEQUENCE, SUMMED, ("all-gather", "reduce-scatter")),
        (PARTIAL, SEQUENCE, ("reduce-scatter", "all-gather")),
        (R, SUMMED, ("-", "all-reduce")),
        (PARTIAL, R, ("all-reduce", "-")),
        (R, SEQUENCE, ("slice", "all-gather")),
        (LAST, R, ("all-gather", "slice")),
        (LAST, SEQUENCE, ("all-to-all", "all-to-all")),
        (SEQUENCE, SEQUENCE, ("-", "-")),
    ],
)
def test_transitions_are_named_in_both_directions(source, target, words):
    assert transition_words(source, target, ("tp",)) == words


def test_bytes_per_rank_follow_from_the_placements():
    text = explain(plan(model("llama"), {"dp_shard": 2, "tp": 2}), element_size=2)
    # Two layers of attention and MLP, embedding and head; norms (5 x 64) stay whole over tp.
    matrices = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96) + 2 * 256 * 64
    cut = matrices // 2 + 320
    assert f"{(matrices + 320):,} elements" in text
    assert f"per rank: {cut * 2 / 1000:.2f} kB of parameters after tp sharding" in text
    assert f"per rank: {cut * 2 // 2 / 1000:.2f} kB held between steps" in text


def test_with_a_workload_bytes_by_axis_and_memory_are_told():
    made = plan(model("qwen3_moe"), {"dp_shard": 2, "ep": 2, "tp": 2})
    text = explain(made, Workload(batch=2, sequence=8, element_size=4, experts_per_token=2))
    for axis, word in (("tp", "reduce-scatter"), ("ep", "all-to-all"), ("dp_shard", "all-gather")):
        assert any(line.split()[:2] == [axis, word] for line in text.splitlines()), (
            f"{axis} {word} in\n{text}"
        )
    assert "A step of 2 sequences of 8 tokens" in text
    assert "optimizer state (8 bytes an element)" in text
    assert "left out" not in text
    assert "expert traffic is left out" in explain(made, Workload(2, 8))


def test_transitions_on_several_axes_are_counted_one_by_one():
    found = collectives(plan(model("llama"), {"cp": 2, "tp": 2}))
    assert set(found) == {"all-gather", "reduce-scatter", "all-reduce"}


def test_collectives_of_a_step_are_counted():
    # Two layers of two blocks, the final norm and the head; the first layer's slice comes back
    # as a gather.
    made = plan(model("llama"), {"tp": 2})
    assert collectives(made) == {
        "all-gather": 4 + 4 + 3,
        "reduce-scatter": 4 + 4 + 1,
        "all-reduce": 1,
    }


def test_a_plan_without_boundaries_is_explained_too():
    text = explain(plan(model("gpt2"), {"dp_shard": 2}))
    assert "one tensor-parallel rank: replicated" in text
    assert "boundary collectives" not in text


def test_a_fused_weight_of_unknown_order_is_said_to_be_gathered():
    text = explain(plan(model("codegen"), {"tp": 2}))
    assert "cut row by row and gathered" in text
    assert "the order of q, k and v in qkv_proj cannot be known" in text
    assert "an override 'transformer.h.*.attn': {order: ...} states it: q|k|v, per_head" in text
    assert "cut row by row and gathered" not in explain(plan(model("phi3"), {"tp": 2}))
