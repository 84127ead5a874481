"""Context parallelism in plans."""

import pytest
import torch
from planner_models import model
from torch.distributed.tensor import Partial, Shard
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from hp_dtensor.plan import Contract, RegionKind
from hp_planner import LintError, lint, plan

R, PART = Contract(), Contract({"cp": Shard(1)})
SUMMED = Contract({}, {"cp": Partial()})
LAYER = "model.layers.1"


def ends(made, module):
    spec = made.boundary(module)
    first, last = spec.inputs[0], spec.outputs[0]
    return first.outside, first.inside, last.inside, last.outside


def test_the_sequence_is_cut_from_the_first_layer_to_the_final_norm():
    made = plan(model("qwen3"), {"cp": 2})
    assert ends(made, "model.layers.0") == (R, PART, PART, PART)
    for name in (LAYER, f"{LAYER}.mlp", f"{LAYER}.self_attn", f"{LAYER}.input_layernorm"):
        assert ends(made, name) == (PART, PART, PART, PART), name
    assert ends(made, "model.norm") == (PART, PART, PART, R)
    for name in ("lm_head", "model.embed_tokens"):
        spec = made.boundary(name)
        assert {tensor.inside for tensor in (*spec.inputs, *spec.outputs)} == {R}, name


def test_what_sees_a_part_of_the_sequence_has_summands_for_gradients():
    made = plan(model("qwen3"), {"cp": 2})
    for spec in made.parameters:
        whole = spec.name in ("model.embed_tokens.weight", "lm_head.weight")
        assert spec.contract == (R if whole else SUMMED), spec.name


def test_attention_gathers_in_an_opaque_region_with_its_own_positions():
    spec = plan(model("qwen3"), {"cp": 2}).boundary(f"{LAYER}.self_attn")
    assert spec.region.kind is RegionKind.OPAQUE
    assert spec.region.function == "hp_integration.regions:context_parallel"
    inside = {tensor.where: tensor.inside for tensor in spec.inputs}
    assert inside["position_embeddings"] == PART
    assert inside["attention_mask"] == R


def test_with_tensor_parallelism_both_axes_cut_the_sequence():
    made = plan(model("qwen3"), {"cp": 2, "tp": 2})
    both = Contract({"cp": Shard(1), "tp": Shard(1)})
    inside = Contract({"cp": Shard(1)}, {"tp": Partial()})
    assert ends(made, f"{LAYER}.mlp")[:2] == (both, inside)
    whole = plan(model("qwen3"), {"cp": 2, "tp": 2}, sequence_parallel=False)
    assert ends(whole, f"{LAYER}.mlp")[0] == PART


def test_experts_work_on_flattened_parts_in_an_opaque_block():
    made = plan(model("qwen3_moe"), {"cp": 2})
    assert made.boundary(f"{LAYER}.mlp").region.kind is RegionKind.OPAQUE
    assert made.parameter(f"{LAYER}.mlp.gate.weight").contract == SUMMED


def test_a_block_left_whole_is_given_the_whole_sequence():
    overrides = {f"{LAYER}.self_attn": "none"}
    made = plan(model("qwen3"), {"cp": 2}, overrides=overrides)
    spec = made.boundary(f"{LAYER}.self_attn")
    assert ends(made, f"{LAYER}.self_attn") == (PART, R, R, PART)
    assert spec.region is None
    assert {tensor.inside for tensor in spec.inputs} == {R}
    assert made.parameter(f"{LAYER}.self_attn.q_proj.weight").contract == R


class OwnAttention(Qwen3Attention):
    """An attention that calls its kernel itself."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.o_proj(torch.nn.functional.scaled_dot_product_attention(q, k, v)), None


def test_an_attention_without_the_table_is_refused_by_name():
    made = model("qwen3")
    made.model.layers[1].self_attn.__class__ = OwnAttention
    with pytest.raises(LintError, match=r"OwnAttention.forward, which does not") as caught:
        plan(made, {"cp": 2})
    assert "override 'model.layers.*.self_attn' with none" in str(caught.value)
    assert len(caught.value.violations) == 1


def test_a_layer_that_works_along_the_sequence_is_refused():
    made = model("qwen3")
    made.model.layers[0].__class__ = ShiftedLayer
    with pytest.raises(
        LintError, match=r"treat every position alike outside their blocks.*ShiftedLayer|roll"
    ):
        plan(made, {"cp": 2})


class ShiftedLayer(Qwen3DecoderLayer):
    """Mixes each position with the one before it."""

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        return hidden_states + hidden_states.roll(1, 1)


def test_a_plan_with_the_axis_is_linted_again_from_its_yaml():
    made, source = plan(model("qwen3_moe"), {"cp": 2, "tp": 2}), model("qwen3_moe")
    assert lint(source, type(made).from_yaml(made.to_yaml())) == ()


def test_a_state_along_the_sequence_is_refused():
    with pytest.raises(LintError, match="carries a state along the sequence"):
        plan(model("mamba2", num_heads=8, head_dim=16, expand=2, state_size=16), {"cp": 2})


def test_a_plan_with_the_axis_validates_without_values():
    from hp_dtensor.meta import validate_on_meta

    made = model("qwen3_moe")
    ids = torch.zeros(2, 8, dtype=torch.long)
    for mesh in ({"cp": 2}, {"ep": 2, "cp": 2, "tp": 4}):  # two key/value heads, shared by ranks
        found = plan(made, mesh)
        report = validate_on_meta(made, found, {"input_ids": ids, "use_cache": False})
        assert report.gradients == len(found.parameters)
