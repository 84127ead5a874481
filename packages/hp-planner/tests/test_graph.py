"""Reading a module into frozen data."""

import pytest
import torch
from planner_models import model
from torch import nn

from hp_planner.graph import read_module


def test_a_node_knows_its_forward_and_parameters():
    graph = read_module(model("qwen3"))
    attention = graph.module("model.layers.0.self_attn")
    assert attention.class_name == "Qwen3Attention"
    assert attention.forward.arguments[:2] == ("hidden_states", "position_embeddings")
    assert attention.forward.returns_tuple
    assert attention.attribute("head_dim") == 16
    mlp = graph.module("model.layers.1.mlp")
    assert mlp.forward.arguments == ("x",)
    assert not mlp.forward.returns_tuple
    weight = graph.module("model.layers.1.mlp.up_proj").parameter("weight")
    assert weight is not None
    assert (weight.shape, weight.element_size, weight.requires_grad) == ((96, 64), 4, True)


def test_sizes_come_from_the_config_under_any_name():
    graph = read_module(model("gpt2", n_embd=32, n_head=2, n_layer=1, vocab_size=64))
    assert graph.size("hidden_size") == 32
    assert graph.size("num_attention_heads") == 2


def test_tied_names_are_one_group_and_listed_under_both():
    graph = read_module(model("llama", tie_word_embeddings=True))
    assert graph.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {p.name for p in graph.parameters}


def test_reading_changes_nothing_in_the_model():
    made = model("qwen3_moe", device="cpu")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in made.modules()]
    attributes = [sorted(vars(m)) for m in made.modules()]
    read_module(made)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in made.modules()] == hooks
    assert [sorted(vars(m)) for m in made.modules()] == attributes
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())


def test_a_model_without_config_is_read():
    graph = read_module(nn.Sequential(nn.Linear(2, 3)))
    assert graph.config == ()
    assert graph.size("hidden_size") is None


def test_anything_but_a_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        read_module({"a": 1})
