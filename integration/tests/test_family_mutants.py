"""Mutants of real models: planned right or refused, never wrong in silence."""

import copy

import pytest
import torch
from torch import nn

from hp_integration.families.configs import randomise, tiny_model
from hp_integration.families.judge import Verdict, batch, judge_model, step
from hp_integration.families.mutants import CHANGES, FAMILIES, MUTATORS

pytestmark = pytest.mark.ranks


def renamed(model):
    attention = model.model.layers[1].self_attn

    class Renamed(type(attention)):
        def forward(self, *args, **kwargs):
            self._modules["q_proj"] = self._modules["queries"]
            try:
                return super().forward(*args, **kwargs)
            finally:
                del self._modules["q_proj"]

    attention.queries = attention.q_proj
    del attention.q_proj
    attention.__class__ = Renamed


class Stored(nn.Module):
    """A projection that keeps its weight [in, out]."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().T.contiguous())

    def forward(self, x):
        return x @ self.weight


def swapped(model):
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Stored(mlp.up_proj)


def swapped_square(model):
    attention = model.model.layers[0].self_attn
    attention.o_proj = Stored(attention.o_proj)


def interleaved_gate_up(model):
    mlp = model.model.layers[0].mlp

    class Interleaved(type(mlp)):
        def forward(self, hidden_states):
            states = self.gate_up_proj(hidden_states)
            return self.down_proj(states[..., ::2] * self.activation_fn(states[..., 1::2]))

    mlp.__class__ = Interleaved


def interleaved_by_chunk(model):
    mlp = model.model.layers[0].mlp

    class Pairs(type(mlp)):
        def forward(self, hidden_states):
            states = self.gate_up_proj(hidden_states)
            gate, up = states.unflatten(-1, (-1, 2)).chunk(2, dim=-1)
            return self.down_proj((up * self.activation_fn(gate)).flatten(-2))

    mlp.__class__ = Pairs


def up_before_gate(model):
    mlp = model.model.layers[0].mlp

    class Reversed(type(mlp)):
        def forward(self, hidden_states):
            up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
            return self.down_proj(up * self.activation_fn(gate))

    mlp.__class__ = Reversed


def interleaved_experts(model):
    experts = model.model.layers[0].mlp.experts

    class Interleaved(type(experts)):
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

    experts.__class__ = Interleaved


def qkv_in_another_order(model):
    attention = model.model.layers[0].self_attn

    class Turned(nn.Linear):
        pass

    class Rolled(type(attention)):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states.flip(0), *args, **kwargs)

    attention.__class__ = Rolled


def missing_bias(model):
    model.model.layers[0].self_attn.q_proj.bias = None
    model.model.layers[1].self_attn.v_proj.bias = None


def added_bias(model):
    for name in ("o_proj", "q_proj"):
        layer = getattr(model.model.layers[0].self_attn, name)
        layer.bias = nn.Parameter(torch.randn(layer.weight.shape[0]))
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.randn(64))


class WithAdapter(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.lora_B(self.lora_A(x))


def adapter(model):
    layer = model.model.layers[0].self_attn.q_proj
    layer.lora_A = nn.Linear(64, 4, bias=False)
    layer.lora_B = nn.Linear(4, layer.weight.shape[0], bias=False)
    layer.__class__ = WithAdapter


def norm_without_weight(model):
    mlp = model.model.layers[0].mlp
    mlp.act_fn = nn.Sequential(nn.SiLU(), nn.LayerNorm(96, elementwise_affine=False))


def softmax_activation(model):
    model.model.layers[0].mlp.act_fn = nn.Softmax(dim=-1)


def norm_over_sequence_outside_blocks(model):
    layer = model.model.layers[0]

    class Mixing(type(layer)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states.cumsum(1), **kwargs)

    layer.__class__ = Mixing


def gate_over_heads(model):
    """A gate whose features all heads share."""
    attention = model.model.layers[0].self_attn
    attention.gate_proj = nn.Linear(64, 16, bias=False)

    class Gated(type(attention)):
        def forward(self, hidden_states, **kwargs):
            out, weights = super().forward(hidden_states, **kwargs)
            gate = self.gate_proj(hidden_states).sigmoid()
            return (out.unflatten(-1, (-1, 16)) * gate[..., None, :]).flatten(-2), weights

    attention.__class__ = Gated


def weight_read_past_its_layer(model):
    attention = model.model.layers[0].self_attn

    class Direct(type(attention)):
        def forward(self, hidden_states, **kwargs):
            out, weights = super().forward(hidden_states, **kwargs)
            return out + nn.functional.linear(hidden_states, self.o_proj.weight), weights

    attention.__class__ = Direct


def tied_projections(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def shared_layer(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


CASES = [
    (renamed, "qwen3", {}, Verdict.REFUSED),
    (swapped, "llama", {}, Verdict.REFUSED),
    (swapped_square, "llama", {}, Verdict.REFUSED),
    (interleaved_gate_up, "phi3", {}, Verdict.RIGHT),
    (interleaved_by_chunk, "phi3", {}, Verdict.RIGHT),
    (up_before_gate, "glm", {}, Verdict.RIGHT),
    (interleaved_experts, "qwen3_moe", {}, Verdict.REFUSED),
    (qkv_in_another_order, "phi3", {}, Verdict.RIGHT),
    (missing_bias, "qwen2", {}, Verdict.RIGHT),
    (added_bias, "llama", {}, Verdict.RIGHT),
    (adapter, "llama", {}, Verdict.REFUSED),
    (norm_without_weight, "llama", {}, Verdict.RIGHT),
    (softmax_activation, "llama", {}, Verdict.RIGHT),
    (norm_over_sequence_outside_blocks, "llama", {}, Verdict.RIGHT),
    (gate_over_heads, "llama", {}, Verdict.RIGHT),
    (weight_read_past_its_layer, "llama", {}, Verdict.RIGHT),
    (tied_projections, "llama", {}, Verdict.RIGHT),
    (shared_layer, "llama", {}, Verdict.RIGHT),
    (lambda model: None, "llama", {"num_key_value_heads": 1}, Verdict.RIGHT),
    (lambda model: None, "qwen3", {"head_dim": 24}, Verdict.RIGHT),
    (lambda model: None, "phi3", {"num_key_value_heads": 1}, Verdict.RIGHT),
    (lambda model: None, "gpt_neox", {"num_attention_heads": 2}, Verdict.RIGHT),
    (lambda model: None, "olmo2", {"num_key_value_heads": 4}, Verdict.RIGHT),
]


def found(mutate, family, changes):
    model = tiny_model(family, **changes)
    mutate(model)
    randomise(model)
    dense = copy.deepcopy(model)
    wanted = step(dense, batch())
    return judge_model(family, model, dense, wanted, {"tp": 2}, "production")


# One of each way a mutant can end, cheap enough to run each time.
SOME = {"renamed", "swapped_square", "interleaved_gate_up", "interleaved_experts", "adapter"}
SOME |= {"missing_bias", "added_bias"}


def marked(case):
    mutate, family, changes, _ = case
    name = mutate.__name__.strip("<>")
    marks = [] if name in SOME else [pytest.mark.slow]
    return pytest.param(*case, marks=marks, id="-".join([family, name, *changes]))


@pytest.mark.parametrize(
    ("mutate", "family", "changes", "expected"), [marked(case) for case in CASES]
)
def test_a_mutant_is_planned_right_or_refused(mutate, family, changes, expected):
    result = found(mutate, family, changes)
    assert result.verdict is expected, (result.note, result.error)


def _outcome(family, changes, mutate):
    """The verdict on one mutant; None where the family cannot be changed so."""
    try:
        torch.manual_seed(0)
        model = tiny_model(family, **changes)
        if mutate is not None and not mutate(model):
            return None
        randomise(model)
        dense = copy.deepcopy(model)
        wanted = step(dense, batch() % 120)
    except Exception:  # whatever transformers says about such sizes
        return None
    return judge_model(family, model, dense, wanted, {"tp": 2}, "production", ids=batch() % 120)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_mutant_of_a_family_is_wrong_in_silence(family):
    cases = [(name, {}, mutate) for name, mutate in MUTATORS.items()]
    cases += [(name, changes, None) for name, changes in CHANGES.items()]
    results = {name: _outcome(family, changes, mutate) for name, changes, mutate in cases}
    verdicts = {name: r.verdict for name, r in results.items() if r is not None}
    assert set(verdicts.values()) <= {Verdict.RIGHT, Verdict.REFUSED}, verdicts
    assert Verdict.RIGHT in verdicts.values()
    assert len(verdicts) > 5
