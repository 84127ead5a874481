"""Orders of fused weights that overrides state: what they change, and what is refused."""

import copy

import pytest
import torch
from planner_models import model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from transformers.models.phi3.modeling_phi3 import (
    Phi3Attention,
    Phi3MLP,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hp_dtensor.equivalence import check_gradients
from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.rules.refusal import OperatorError
from hp_planner import LintError, PlanError, lint, plan
from hp_planner.order import SPLITTERS, Order, read_told
from hp_platform.testing import run_ranks


class Turned(Phi3Attention):
    """q, k and v of a fused weight taken apart in an order of its own."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        batch, length = hidden_states.shape[:2]
        parts = self.taken_apart(self.qkv_proj(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out, weights = eager_attention_forward(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling
        )
        return self.o_proj(out.reshape(batch, length, -1)), weights


class Groups(Turned):
    """For every key/value head its query heads, its k and its v."""

    def taken_apart(self, fused):
        groups = fused.unflatten(-1, (-1, self.num_key_value_groups + 2, self.head_dim))
        return [part.flatten(2, 3) for part in groups.split([self.num_key_value_groups, 1, 1], 3)]


class ValuesFirst(Turned):
    """v, k, q; counted by a size of its own."""

    def taken_apart(self, fused):
        rest = fused.shape[-1] - 2 * self.kv_size
        value, key, query = fused.split([self.kv_size, self.kv_size, rest], dim=-1)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in (query, key, value)]


class Alternating(Phi3MLP):
    def forward(self, hidden_states):
        states = self.gate_up_proj(hidden_states)
        return self.down_proj(states[..., 1::2] * self.activation_fn(states[..., ::2]))


class AlternatingExperts(Qwen3MoeExperts):
    def _apply_gate(self, states):
        return self.act_fn(states[..., ::2]) * states[..., 1::2]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            slot, token = torch.where((top_k_index == expert).T)
            states = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])
            out = nn.functional.linear(self._apply_gate(states), self.down_proj[expert])
            result.index_add_(0, token, out * top_k_weights[token, slot, None])
        return result


def turned(attention=None, mlp=None, experts=None, device="meta"):
    made = model(
        "phi3" if experts is None else "qwen3_moe",
        device,
        **({} if experts else {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        num_hidden_layers=1,
    )
    layer = made.model.layers[0]
    if attention is not None:
        layer.self_attn.__class__ = attention
        layer.self_attn.kv_size = 32
    if mlp is not None:
        layer.mlp.__class__ = mlp
    if experts is not None:
        layer.mlp.experts.__class__ = experts
    return made


TAKEN = ["taken_apart"]
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
QKV, GATE_UP = f"{ATTENTION}.qkv_proj.weight", f"{MLP}.gate_up_proj.weight"


def placement(made, name):
    return made.parameter(name).contract.placement("tp")


@pytest.mark.parametrize(
    ("parts", "name", "override", "expected"),
    [
        ({"attention": Groups}, QKV, {"order": "per_group", "names": TAKEN}, Shard(0)),
        (
            {"attention": ValuesFirst},
            QKV,
            {"order": "v|k|q", "names": TAKEN, "divide": ["kv_size"]},
            SectionedShard(0, (32, 32, 64)),
        ),
        ({"mlp": Alternating}, GATE_UP, {"order": "interleaved"}, Shard(0)),
        ({"mlp": Alternating}, GATE_UP, {"order": "up|gate"}, SectionedShard(0, (96, 96))),
    ],
)
def test_a_stated_order_decides_how_the_weight_is_cut_and_stays_in_the_plan(
    parts, name, override, expected
):
    made = turned(**parts)
    block = name.rsplit(".", 2)[0]
    found = plan(made, {"tp": 2}, overrides={block: override})
    assert placement(found, name) == expected
    assert f"by override '{block}'" in found.parameter(name).reason
    # The plan says enough to be linted with nothing but the model.
    assert lint(made, ShardingPlan.from_yaml(found.to_yaml())) == ()
    for key in (f"{block}.{name.split('.')[-2]}", name):
        assert placement(plan(made, {"tp": 2}, overrides={key: override}), name) == expected


def test_without_a_statement_the_weight_is_gathered_and_the_plan_says_what_to_type():
    for parts, name in (({"attention": Groups}, QKV), ({"mlp": Alternating}, GATE_UP)):
        reason = plan(turned(**parts), {"tp": 2}).parameter(name).reason
        assert "cut row by row and gathered" in reason
        assert f"an override '{name.rsplit('.', 2)[0].replace('.0.', '.*.')}'" in reason


def test_experts_of_unknown_order_are_refused_until_it_is_stated():
    made = turned(experts=AlternatingExperts)
    with pytest.raises(LintError, match=r"override 'model\.layers\.\*\.mlp\.experts'.*interleaved"):
        plan(made, {"tp": 2})
    found = plan(made, {"tp": 2}, overrides={"*.experts": {"order": "interleaved"}})
    assert placement(found, f"{MLP}.experts.gate_up_proj") == Shard(1)


@pytest.mark.parametrize(
    ("parts", "key", "override", "text"),
    [
        ({"attention": Groups}, "*.self_attn", {"order": "per_group"}, "uses taken_apart"),
        ({"attention": Groups}, "*.self_attn", {"order": "gate|up"}, "one of the orders q|k|v"),
        (
            {"attention": Groups},
            "*.self_attn",
            {"order": "per_head", "names": TAKEN},
            "a k and a v for each of 4 heads, found 2",
        ),
        (
            {"attention": Groups},
            "*.self_attn",
            {"order": "per_group", "names": TAKEN, "divide": ["kv_size"]},
            "reads no integer self.kv_size",
        ),
        ({}, "*.self_attn", {"order": "v|k|q"}, "its order is q|k|v: slices qkv"),
        ({}, "*.mlp", {"order": "interleaved"}, "shows that gate and up are halves"),
        ({}, "lm_head", {"order": "gate|up"}, "no fused weight here"),
        ({}, "*.self_atn", {"order": "q|k|v"}, "nearest: model.layers.0.self_attn"),
    ],
)
def test_a_statement_that_cannot_be_meant_is_refused(parts, key, override, text):
    with pytest.raises(PlanError) as caught:
        plan(turned(**parts), {"tp": 2}, overrides={key: override})
    assert text in str(caught.value)
    assert repr(key) in str(caught.value)


def test_an_order_is_read_from_the_reason_that_carries_it():
    order = Order("per_group", frozenset({"a_b"}) | SPLITTERS, frozenset({"n"}), "*.x y")
    assert read_told(f"fused projections; {order.told()}") == order
    assert read_told("order per_head by override of nothing") is None


def _loss(made, ids):
    return made(input_ids=ids, labels=ids, use_cache=False).loss


def _agrees(made, found, mesh, ids):
    """Whether the modes and the dense model agree; a contradiction may also stop validate mode."""
    try:
        return check_gradients(lambda: copy.deepcopy(made), found, mesh, ids, _loss).ok
    except OperatorError:
        return False


STATED = (
    ({"attention": Groups}, ATTENTION, {"order": "per_group", "names": TAKEN}, True),
    ({"attention": Groups}, ATTENTION, {"order": "q|k|v", "names": TAKEN}, False),
    (
        {"attention": ValuesFirst},
        ATTENTION,
        {"order": "v|k|q", "names": TAKEN, "divide": ["kv_size"]},
        True,
    ),
    (
        {"attention": ValuesFirst},
        ATTENTION,
        {"order": "k|v|q", "names": TAKEN, "divide": ["kv_size"]},
        True,  # k and v have as many rows
    ),
    (
        {"attention": ValuesFirst},
        ATTENTION,
        {"order": "q|k|v", "names": TAKEN, "divide": ["kv_size"]},
        False,
    ),
    ({"mlp": Alternating}, MLP, {"order": "interleaved"}, True),
    ({"mlp": Alternating}, MLP, {"order": "gate|up"}, False),
    ({"experts": AlternatingExperts}, f"{MLP}.experts", {"order": "interleaved"}, True),
    ({"experts": AlternatingExperts}, f"{MLP}.experts", {"order": "gate|up"}, False),
)


@pytest.mark.ranks
def test_a_right_statement_gives_the_dense_values_and_a_wrong_one_is_found():
    prepared = []
    for parts, key, override, right in STATED:
        torch.manual_seed(0)
        made = turned(**parts, device="cpu")
        found = plan(made, {"tp": 2}, overrides={key: override})
        prepared.append((made, found, right))
    ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(1))

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return [_agrees(made, found, mesh, ids) for made, found, _ in prepared]

    wanted = [right for *_, right in STATED]
    assert run_ranks(body, 2, timeout=200) == [wanted, wanted]
