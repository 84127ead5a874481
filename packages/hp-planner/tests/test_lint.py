"""Lint: mutants of models and of plans are planned right or refused, never silently wrong."""

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from planner_models import config, model
from torch import nn
from torch.distributed.tensor import Partial, Shard
from transformers.models.llama.modeling_llama import LlamaMLP

from hp_dtensor.plan import BoundaryTensor, Contract
from hp_planner import LintError, lint, plan

MESH = {"tp": 2}
SUMMED = Contract({}, {"tp": Partial()})


def refusal(made, mesh=MESH, **options):
    with pytest.raises(LintError) as caught:
        plan(made, mesh, **options)
    return caught.value


def rules(error):
    return {violation.rule for violation in error.violations}


def test_a_derived_plan_has_no_violation():
    made = model("qwen3_moe", mlp_only_layers=[1])
    assert lint(made, plan(made, MESH)) == ()


# Mutants of the model.


def test_a_renamed_leaf_is_refused_by_name():
    made = model("qwen3")
    attention = made.model.layers[1].self_attn
    attention.queries = attention.q_proj
    del attention.q_proj
    error = refusal(made)
    assert "model.layers.1.self_attn.queries.weight" in str(error)
    assert "model.layers.*.self_attn.queries.weight" in str(error)


def test_a_missing_bias_is_planned_as_the_others():
    made = model("qwen2")
    made.model.layers[0].self_attn.k_proj.bias = None
    names = {spec.name for spec in plan(made, MESH).parameters}
    assert "model.layers.0.self_attn.k_proj.bias" not in names
    assert "model.layers.0.self_attn.q_proj.bias" in names


def test_swapped_orientation_of_a_projection_is_refused():
    made = model("qwen3")
    made.model.layers[0].mlp.up_proj = nn.Linear(96, 64, bias=False, device="meta")
    assert "shapes do not fit one MLP" in str(refusal(made)) or "takes 96" in str(refusal(made))


@pytest.mark.parametrize("head_dim", [8, 32])
def test_other_head_sizes_are_planned_by_what_the_module_says(head_dim):
    made = plan(model("qwen3", head_dim=head_dim), MESH)
    assert made.parameter("model.layers.0.self_attn.q_norm.weight").contract == SUMMED
    assert made.parameter("model.layers.0.self_attn.q_proj.weight").shape == (4 * head_dim, 64)


def test_rows_that_are_no_whole_heads_are_not_split_into_heads():
    made = model("llama")
    made.model.layers[0].self_attn.head_dim = 24
    found = plan(made, MESH)
    assert "not a multiple of head_dim 24" in found.boundary("model.layers.0.self_attn").reason


def test_an_adapter_weight_inside_attention_is_refused():
    made = model("qwen3")
    made.model.layers[0].self_attn.q_proj.lora_A = nn.Linear(64, 4, bias=False, device="meta")
    assert "self_attn.q_proj.lora_A.weight" in str(refusal(made))


def test_a_frozen_unknown_parameter_is_refused_too():
    made = model("qwen3")
    scale = nn.Parameter(torch.ones(64, device="meta"), requires_grad=False)
    made.model.layers[0].scale = scale
    assert "model.layers.0.scale" in str(refusal(made))


@pytest.mark.parametrize("family", ["ctrl", "doge", "diffllama"])
def test_families_out_of_reach_are_refused_by_name(family):
    error = refusal(model(family))
    assert f"model_type {family!r}" in str(error)
    assert "remedy:" in str(error)


def test_global_head_counts_that_a_forward_reads_are_localised():
    spec = plan(model("stablelm"), MESH).boundary("model.layers.0.self_attn")
    assert {(a.name, a.value) for a in spec.localize} >= {("num_heads", 4)}


# Sizes.


def test_heads_that_do_not_divide_are_refused_with_their_number():
    error = refusal(model("qwen3"), {"tp": 8})
    assert rules(error) == {"heads"}
    assert "4 query heads" in str(error)
    assert "model.layers.{0..1}.self_attn" in str(error)


def test_a_vocabulary_that_does_not_divide_is_refused():
    error = refusal(model("qwen3", vocab_size=257))
    assert {violation.where for violation in error.violations} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert "pad the vocabulary" in str(error)


def test_intermediate_features_that_do_not_divide_are_refused():
    assert rules(refusal(model("qwen3", intermediate_size=97))) == {"divisibility"}
    error = refusal(model("qwen3_moe", moe_intermediate_size=33))
    assert "model.layers.{0..1}.mlp.experts.gate_up_proj" in str(error)


def test_all_violations_come_in_one_report():
    made = model("qwen3", vocab_size=257, intermediate_size=97)
    made.model.layers[0].scale = nn.Parameter(torch.ones(64, device="meta"))
    assert rules(refusal(made, {"tp": 8})) == {"coverage", "heads", "divisibility"}


# Code.


def test_a_loss_on_router_logits_is_refused():
    assert "output_router_logits" in str(refusal(model("qwen3_moe", output_router_logits=True)))


def test_dropout_by_functions_is_refused_while_it_is_drawn():
    text = str(refusal(model("seed_oss", residual_dropout=0.1)))
    assert "SeedOssAttention.residual_dropout = 0.1" in text
    assert "--set attention_dropout=0 residual_dropout=0)" in text
    made = model("qwen3", attention_dropout=0.1)
    for mesh in (MESH, {"cp": 2}):
        assert "Qwen3Attention.attention_dropout = 0.1" in str(refusal(made, mesh))
    plan(made.eval(), MESH)
    for code, named in DROPPING.items():
        made = model("llama")
        made.model.layers[0].mlp.__class__, made.model.layers[0].mlp.rate = code, 0.3
        text = str(refusal(made))
        assert f"found {code.__name__}.{named} = 0.3" in text
        assert "--set" not in text


class StatedRate(LlamaMLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class HeldRate(LlamaMLP):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), p=self.rate, training=self.training)


DROPPING = {StatedRate: "dropout()", HeldRate: "rate"}


def test_all_dropouts_are_one_violation_with_what_to_type():
    drawn = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.2, "summary_first_dropout": 0.0}
    text = str(refusal(model("gpt2", **drawn)))
    assert text.count("[random]") == 1
    assert "found GPT2Attention.attn_dropout.p = 0.1\n" in text
    assert "--set attn_pdrop=0)" in text
    bloom = str(refusal(model("bloom", hidden_dropout=0.1, attention_dropout=0.2)))
    # Its attention drops by a module, on every head on every rank.
    assert "--set hidden_dropout=0)" in bloom


def test_noise_on_the_tokens_is_refused():
    assert "router_jitter_noise" in str(refusal(model("mixtral", router_jitter_noise=0.1)))


def test_a_layer_that_mixes_positions_gets_all_of_them():
    made = model("qwen3")

    class Shifting(type(made.model.layers[0])):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return super().forward(hidden_states.roll(1, 1), attention_mask, **kwargs)

    with torch.device("meta"):
        made.model.layers[1] = Shifting(config("qwen3"), 1)
    assert "Shifting.forward calls" in plan(made, MESH).boundary("").reason


def test_an_mlp_that_takes_inner_features_together_gets_all_of_them():
    """Else each rank would take the norm of its own part of them, in silence."""
    made = model("qwen3")

    class Normed(type(made.model.layers[0].mlp)):
        def forward(self, x):
            hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(hidden / hidden.norm(dim=-1, keepdim=True))

    made.model.layers[1].mlp.__class__ = Normed
    found = plan(made, MESH)
    assert "its forward uses norm" in found.boundary("model.layers.1.mlp").reason
    assert found.boundary("model.layers.1.mlp.up_proj").outputs[0].outside == Contract()


def test_a_layer_that_averages_over_positions_gets_all_of_them():
    made = model("qwen3")

    class Gated(type(made.model.layers[0])):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            gate = hidden_states.mean(1, keepdim=True).sigmoid()
            return super().forward(hidden_states, attention_mask, **kwargs) * gate

    made.model.layers[1].__class__ = Gated
    assert "Gated.forward calls" in plan(made, MESH).boundary("").reason


def test_a_layer_that_takes_unknown_tensors_gets_whole_hidden_states():
    made = model("qwen3")

    class Conditioned(type(made.model.layers[0])):
        def forward(self, hidden_states, condition, **kwargs):
            return super().forward(hidden_states + condition, **kwargs)

    with torch.device("meta"):
        made.model.layers[1] = Conditioned(config("qwen3"), 1)
    assert "Conditioned.forward" in plan(made, MESH).boundary("").reason


# Ties.


def test_tied_embedding_and_head_are_listed_once():
    made = plan(model("qwen3", tie_word_embeddings=True), MESH)
    assert made.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "lm_head.weight" not in {spec.name for spec in made.parameters}


def test_tied_weights_must_be_placed_alike():
    made = model("qwen3", tie_word_embeddings=True)
    error = refusal(made, overrides={"lm_head": "none"})
    assert "tied" in rules(error)
    both = {"lm_head": "none", "model.embed_tokens": "none"}
    assert plan(made, MESH, overrides=both).parameter("model.embed_tokens.weight")


def test_weights_shared_between_layers_are_placed_once():
    made = model("qwen3")
    made.model.layers[1].mlp.up_proj.weight = made.model.layers[0].mlp.up_proj.weight
    assert ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight") in plan(
        made, MESH
    ).tied


def test_a_tied_weight_needs_a_role_under_every_name():
    made = model("qwen3", tie_word_embeddings=True)
    made.scores = made.lm_head
    del made.lm_head
    assert "a role with a template under this name" in str(refusal(made))


# Mutants of the plan.


def with_parameter(made, name, **changes):
    specs = tuple(evolve(s, **changes) if s.name == name else s for s in made.parameters)
    return evolve(made, parameters=specs)


def with_boundary(made, module, **changes):
    specs = tuple(evolve(b, **changes) if b.module == module else b for b in made.boundaries)
    return evolve(made, boundaries=specs)


def tensor(old, **changes):
    return (evolve(old[0], **changes), *old[1:])


def mutants(made):
    attention = made.boundary("model.layers.1.self_attn")
    norm = made.boundary("model.norm")
    weight = "model.layers.1.self_attn.o_proj.weight"
    yield (
        "wrong placement",
        with_parameter(made, weight, contract=Contract({"tp": Shard(0)})),
        weight,
    )
    name = "model.layers.0.input_layernorm.weight"
    yield "wrong gradient placement", with_parameter(made, name, contract=Contract()), name
    yield (
        "missing reduction",
        with_boundary(
            made,
            attention.module,
            outputs=tensor(attention.outputs, inside=attention.outputs[0].outside),
        ),
        attention.module,
    )
    yield (
        "swapped contract",
        with_boundary(
            made,
            attention.module,
            inputs=tensor(
                attention.inputs,
                outside=attention.inputs[0].inside,
                inside=attention.inputs[0].outside,
            ),
        ),
        attention.module,
    )
    yield (
        "neighbour's gradient",
        with_boundary(made, "model.norm", outputs=tensor(norm.outputs, outside=Contract())),
        "lm_head",
    )
    yield "no boundary", evolve(made, boundaries=made.boundaries[:-1]), "lm_head"
    yield "no entry", evolve(made, parameters=made.parameters[1:]), "model.embed_tokens.weight"
    twice = evolve(made, parameters=(*made.parameters, made.parameters[0]))
    yield "two entries", twice, "model.embed_tokens.weight"
    other = with_parameter(made, weight, shape=(64, 32))
    yield "other shape", other, weight
    stray = with_parameter(made, weight, contract=Contract({"dp_shard": Shard(0)}))
    yield "data axis", stray, weight
    extra = evolve(made.boundaries[-1], module="model.rotary_emb", outputs=(), inputs=())
    yield "extra boundary", evolve(made, boundaries=(*made.boundaries, extra)), "model.rotary_emb"
    lost = tensor(attention.inputs, inside=Contract())
    yield "lost gradient sum", with_boundary(made, attention.module, inputs=lost), attention.module


def test_every_fault_planted_in_a_plan_is_found_at_its_place():
    made = model("qwen3")
    good = plan(made, {"dp_shard": 2, "tp": 2})
    missed = []
    for label, bad, where in mutants(good):
        assert bad != good, label
        found = {violation.where for violation in lint(made, bad)}
        if where not in found:
            missed.append((label, found))
    assert missed == []


def test_localised_attributes_and_regions_are_checked():
    made = model("qwen3_moe")
    good = plan(made, MESH)
    name = "model.layers.0.mlp.experts"
    for changes in ({"localize": ()}, {"region": None}):
        assert name in {v.where for v in lint(made, with_boundary(good, name, **changes))}


def test_a_plan_for_another_model_is_found_out():
    found = lint(model("qwen3", num_hidden_layers=3), plan(model("qwen3"), MESH))
    assert {"coverage", "template"} <= {violation.rule for violation in found}


def test_boundary_tensors_compare_gradients_too():
    assert BoundaryTensor("x", SUMMED, SUMMED) != BoundaryTensor("x", Contract(), SUMMED)
