"""Models come out the same wherever they are built, and mistakes are one line."""

import json
from pathlib import Path

import pytest
import torch

from hp_integration.errors import InputError
from hp_integration.models import (
    BUILT_IN,
    abstract_model,
    build_model,
    decoder_layers,
    model_config,
    parameter_count,
)

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_the_weights_depend_on_the_seed_alone(tiny_file: Path) -> None:
    config = model_config("dense", vocabulary=256, config_file=tiny_file)
    one = build_model(config, seed=1).state_dict()
    torch.rand(3)
    same = build_model(config, seed=1).state_dict()
    other = build_model(config, seed=2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_building_a_model_leaves_the_global_generator_alone(tiny_file: Path) -> None:
    config = model_config("dense", vocabulary=256, config_file=tiny_file)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_model(config, seed=1)
    assert torch.equal(torch.rand(1), expected)


def test_the_default_model_has_a_few_million_parameters_in_fused_experts() -> None:
    model = abstract_model(model_config("moe", vocabulary=256))
    assert 2_000_000 < parameter_count(model) < 5_000_000
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert experts.get_parameter("gate_up_proj").ndim == 3
    assert model.config._experts_implementation == "eager"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", [*BUILT_IN, "mistral", "Qwen2ForCausalLM"])
def test_a_model_is_found_by_short_name_type_or_class(name: str, tiny_file: Path) -> None:
    config = model_config(name, vocabulary=300, config_file=tiny_file)
    model = abstract_model(config)
    assert config.vocab_size == 300
    assert [name for name, _ in decoder_layers(model)] == ["model.layers.0", "model.layers.1"]


def test_a_file_may_ask_for_a_larger_vocabulary_but_not_a_smaller_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "vocab_size": 512}))
    assert model_config("dense", vocabulary=256, config_file=path).vocab_size == 512
    path.write_text(json.dumps({**TINY, "vocab_size": 100}))
    with pytest.raises(InputError, match="vocab_size is 100"):
        model_config("dense", vocabulary=256, config_file=path)


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match="JSON"):
        model_config("dense", vocabulary=256, config_file=path)


def test_an_unknown_model_is_one_line_that_says_what_is_known() -> None:
    with pytest.raises(InputError, match="--model gpt-17: unknown; give moe, dense") as caught:
        model_config("gpt-17", vocabulary=256)
    assert "\n" not in str(caught.value)
