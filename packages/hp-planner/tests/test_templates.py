"""Contracts of every kind of boundary, exactly."""

import pytest
from planner_models import model
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    eager_attention_forward,
)

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import BoundaryKind, Contract, LocalAttribute, RegionKind
from hp_planner import LintError, plan
from hp_planner.data_flow import feeds

R = Contract()
SUMMED = Contract({}, {"tp": Partial()})
P = Contract({"tp": Partial()})


def cut(dim):
    return Contract({"tp": Shard(dim)})


def flow(spec):
    """Inputs and outputs that carry a layout: name to (outside, inside)."""
    tensors = (*spec.inputs, *spec.outputs)
    return {t.where: (t.outside, t.inside) for t in tensors if not t.plain}


def plain(spec):
    return [t.where for t in spec.inputs if t.plain]


@pytest.fixture(scope="module")
def moe():
    return plan(model("qwen3_moe", mlp_only_layers=[1]), {"dp_shard": 2, "tp": 2})


def test_parameters_with_sequence_parallelism(moe):
    expected = {
        "model.embed_tokens.weight": cut(0),
        "model.layers.0.self_attn.q_proj.weight": cut(0),
        "model.layers.0.self_attn.k_proj.weight": cut(0),
        "model.layers.0.self_attn.v_proj.weight": cut(0),
        "model.layers.0.self_attn.o_proj.weight": cut(1),
        "model.layers.0.self_attn.q_norm.weight": SUMMED,
        "model.layers.0.self_attn.k_norm.weight": SUMMED,
        "model.layers.0.mlp.gate.weight": SUMMED,
        "model.layers.0.mlp.experts.gate_up_proj": Contract({"tp": SectionedShard(1, (32, 32))}),
        "model.layers.0.mlp.experts.down_proj": cut(2),
        "model.layers.0.input_layernorm.weight": SUMMED,
        "model.layers.0.post_attention_layernorm.weight": SUMMED,
        "model.layers.1.mlp.gate_proj.weight": cut(0),
        "model.layers.1.mlp.up_proj.weight": cut(0),
        "model.layers.1.mlp.down_proj.weight": cut(1),
        "model.norm.weight": SUMMED,
        "lm_head.weight": cut(0),
    }
    assert {name: moe.parameter(name).contract for name in expected} == expected


def test_boundaries_with_sequence_parallelism(moe):
    stream = cut(1)
    block = {"hidden_states": (stream, SUMMED), "": (stream, P)}
    expected = {
        "": (BoundaryKind.MODEL, {}),
        "model.embed_tokens": (BoundaryKind.EMBEDDING, {"": (R, P)}),
        "model.layers.0": (
            BoundaryKind.LAYER,
            {"hidden_states": (R, stream), "": (stream, stream)},
        ),
        "model.layers.1": (
            BoundaryKind.LAYER,
            {"hidden_states": (stream, stream), "": (stream, stream)},
        ),
        "model.layers.0.self_attn": (
            BoundaryKind.ATTENTION,
            {"hidden_states": (stream, SUMMED), "0": (stream, P)},
        ),
        "model.layers.0.mlp": (BoundaryKind.MOE, block),
        "model.layers.0.mlp.experts": (
            BoundaryKind.EXPERTS,
            {
                "hidden_states": (SUMMED, SUMMED),
                "top_k_weights": (SUMMED, SUMMED),
                "": (P, P),
            },
        ),
        "model.layers.1.mlp": (BoundaryKind.MLP, {"x": (stream, SUMMED), "": (stream, P)}),
        "model.layers.0.input_layernorm": (
            BoundaryKind.NORM,
            {"hidden_states": (stream, stream), "": (stream, stream)},
        ),
        "model.norm": (
            BoundaryKind.NORM,
            {"hidden_states": (stream, stream), "": (SUMMED, stream)},
        ),
        "lm_head": (BoundaryKind.HEAD, {"input": (SUMMED, SUMMED), "": (R, cut(-1))}),
    }
    found = {name: moe.boundary(name) for name in expected}
    assert {name: (spec.kind, flow(spec)) for name, spec in found.items()} == expected


def test_plain_inputs_are_ids_masks_and_position_tables(moe):
    assert plain(moe.boundary("")) == ["input_ids", "labels"]
    assert plain(moe.boundary("model.embed_tokens")) == ["input"]
    assert plain(moe.boundary("model.layers.0.self_attn")) == [
        "position_embeddings",
        "attention_mask",
    ]
    assert plain(moe.boundary("model.layers.0.mlp.experts")) == ["top_k_index"]


def test_experts_are_an_opaque_region_with_their_size_localised(moe):
    spec = moe.boundary("model.layers.0.mlp.experts")
    assert spec.region is not None
    assert spec.region.kind is RegionKind.OPAQUE
    assert spec.localize == (LocalAttribute("intermediate_dim", "tp", 32),)


def test_without_sequence_parallelism_the_stream_is_whole():
    made = plan(model("qwen3"), {"tp": 2}, sequence_parallel=False)
    assert flow(made.boundary("model.layers.0")) == {"hidden_states": (R, R), "": (R, R)}
    assert flow(made.boundary("model.layers.1.self_attn")) == {
        "hidden_states": (R, SUMMED),
        "0": (R, P),
    }
    assert flow(made.boundary("model.layers.1.mlp")) == {"x": (R, SUMMED), "": (R, P)}
    assert flow(made.boundary("model.norm")) == {"hidden_states": (R, R), "": (R, R)}
    assert flow(made.boundary("lm_head")) == {"input": (R, SUMMED), "": (R, cut(-1))}
    assert made.parameter("model.norm.weight").contract == R
    assert made.parameter("model.layers.0.self_attn.q_norm.weight").contract == SUMMED


def test_a_base_model_without_head_ends_whole_with_a_whole_gradient():
    made = plan(model("llama").model, {"tp": 2})
    assert flow(made.boundary("norm")) == {"hidden_states": (cut(1), cut(1)), "": (R, cut(1))}


def test_the_bias_of_an_output_projection_is_added_once_to_the_sum():
    made = plan(model("llama", attention_bias=True, mlp_bias=True), {"tp": 2})
    for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        full = f"model.layers.0.{block}.{name}"
        assert made.parameter(f"{full}.weight").contract == cut(1)
        assert made.parameter(f"{full}.bias").contract == SUMMED
        assert flow(made.boundary(full)) == {"input": (cut(-1), cut(-1)), "": (cut(1), P)}
    assert flow(made.boundary("model.layers.0.mlp"))[""] == (cut(1), cut(1))


def test_a_norm_over_all_heads_gathers_them():
    made = plan(model("olmo2"), {"tp": 2})
    name = "model.layers.0.self_attn.q_norm"
    assert flow(made.boundary(name)) == {"hidden_states": (cut(-1), R), "": (cut(-1), R)}
    assert made.parameter(f"{name}.weight").contract == R
    assert made.parameter("model.layers.0.self_attn.q_proj.weight").contract == cut(0)


def test_a_block_whose_code_is_not_known_is_sharded_linear_by_linear():
    made = plan(model("codegen", n_layer=1, rotary_dim=8), {"tp": 2})
    qkv, out = (f"transformer.h.0.attn.{name}" for name in ("qkv_proj", "out_proj"))
    assert flow(made.boundary(qkv)) == {"input": (R, SUMMED), "": (R, cut(-1))}
    assert flow(made.boundary(out)) == {"input": (R, cut(-1)), "": (R, P)}


def test_fused_q_k_and_v_of_known_order_are_cut_each_by_itself():
    """Four query heads and two of k and v: each rank holds two and one of each."""
    made = plan(model("phi3"), {"tp": 2})
    name = "model.layers.0.self_attn"
    contract = made.parameter(f"{name}.qkv_proj.weight").contract
    assert contract.placement("tp") == SectionedShard(0, (64, 32, 32))
    assert {(a.name, a.value) for a in made.boundary(name).localize} == {
        ("config.num_attention_heads", 4),
        ("num_key_value_heads", 2),
    }


def test_fused_gate_and_up_are_cut_each_by_itself():
    made = plan(model("glm"), {"tp": 2})
    contract = made.parameter("model.layers.0.mlp.gate_up_proj.weight").contract
    assert contract.placement("tp") == SectionedShard(0, (96, 96))


def test_ranks_share_key_value_heads_where_there_are_fewer_than_ranks():
    """Query heads are cut; k and v are whole, each rank has summands of their gradients."""
    made = plan(model("olmo2", num_key_value_heads=1, attention_bias=True), {"tp": 2})
    name = "model.layers.0.self_attn"
    spec = made.boundary(name)
    assert spec.region.function == "hp_integration.regions:shared_heads"
    assert flow(spec)["hidden_states"][1] == SUMMED
    assert {
        made.parameter(f"{name}.{p}_proj.{leaf}").contract
        for p in "kv"
        for leaf in ("weight", "bias")
    } == {SUMMED}
    assert made.parameter(f"{name}.q_proj.weight").contract == cut(0)
    # The norm over all query heads gathers them; every rank has all key heads already.
    assert name + ".q_norm" in {s.module for s in made.boundaries}
    assert name + ".k_norm" not in {s.module for s in made.boundaries}
    assert made.parameter(f"{name}.k_norm.weight").contract == SUMMED


def test_attention_that_cannot_share_its_heads_computes_all_of_them_on_every_rank():
    made = plan(model("phi3", num_key_value_heads=1), {"tp": 2})
    reason = made.boundary("model.layers.0.self_attn").reason
    assert (
        "1 key/value heads are too few for 2 ranks, which cannot share them: q, k and v" in reason
    )


def test_a_dropout_says_how_what_it_drops_from_is_laid_out():
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
    made = plan(model("gpt2", n_embd=64, n_head=4, **rates), {"tp": 2})
    for name in ("drop", "h.0.attn.resid_dropout", "h.1.mlp.dropout"):
        # After an output projection, whose bias is added to the sum, hidden states are whole.
        assert flow(made.boundary(f"transformer.{name}")) == {"input": (R, R), "": (R, R)}, name
    inner = plan(_with_dropouts(), {"tp": 2})
    found = [
        inner.boundary(f"model.layers.0.{name}").inputs[0].inside
        for name in ("mlp.inner", "mlp.last", "self_attn.last", "residual")
    ]
    assert found == [cut(-1), P, P, cut(1)]


class DroppedMLP(LlamaMLP):
    def forward(self, x):
        inner = self.inner(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.last(self.down_proj(inner))


def _with_dropouts():
    """A Llama that drops inner features, and summands of what its blocks give."""
    made = model("llama")
    for layer in made.model.layers:
        layer.mlp.__class__ = DroppedMLP
        layer.mlp.inner, layer.mlp.last = nn.Dropout(0.1), nn.Dropout(0.1)
        layer.self_attn.__class__ = DroppedAttention
        layer.self_attn.last, layer.residual = nn.Dropout(0.1), nn.Dropout(0.1)
    return made


class DroppedAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        output = self.o_proj(eager_attention_forward(self, q, k, v, attention_mask))
        return self.last(output), None


class DroppedByHelpers(DroppedMLP):
    def forward(self, x):
        return self._given(inner=self._features(x))

    def _features(self, x):
        return self.inner(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def _given(self, inner):
        return self.last(self.down_proj(inner))


def test_what_feeds_a_dropout_is_followed_into_methods():
    assert dict(feeds(DroppedByHelpers)) == dict(feeds(DroppedMLP))
    assert dict(feeds(DroppedMLP))["inner"] == {"act_fn", "gate_proj", "up_proj"}


def test_a_dropout_whose_place_is_not_known_is_refused_by_name():
    class Chosen(DroppedMLP):
        def forward(self, x):
            return self.last(self.down_proj(x))

    made = _with_dropouts()
    made.model.layers[0].mlp.__class__ = Chosen
    with pytest.raises(LintError, match=r"layers\.\*\.mlp\.inner = 0\.1"):
        plan(made, {"tp": 2})


def test_what_is_replicated_says_why():
    made = plan(model("mamba", num_hidden_layers=1), {"tp": 2})
    assert "replicated: " in made.parameter("backbone.layers.0.mixer.A_log").reason


def test_a_shared_expert_returns_a_summand_beside_the_routed_ones():
    made = plan(model("qwen2_moe"), {"tp": 2})
    assert flow(made.boundary("model.layers.0.mlp.shared_expert")) == {
        "x": (SUMMED, SUMMED),
        "": (P, P),
    }
    assert made.parameter("model.layers.0.mlp.shared_expert_gate.weight").contract == SUMMED


def test_one_tensor_parallel_rank_replicates_everything_and_needs_no_boundary():
    for mesh in ({"dp_shard": 4}, {"dp_shard": 4, "tp": 1}):
        made = plan(model("gpt2"), mesh)
        assert made.boundaries == ()
        assert {spec.contract for spec in made.parameters} == {R}
        assert len(made.parameters) == len(list(model("gpt2").parameters()))


def test_a_replicated_gradient_is_default_only_where_every_rank_computes_all_of_it(moe):
    """A whole gradient on a replicated parameter would be one rank's part of the sequence."""
    replicated = [s for s in moe.parameters if isinstance(s.contract.placement("tp"), Replicate)]
    assert replicated
    assert all(isinstance(s.contract.grad_placement("tp"), Partial) for s in replicated)
