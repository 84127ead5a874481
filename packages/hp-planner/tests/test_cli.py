"""hp-plan: output, files and exit codes."""

import json

import pytest
from planner_models import SIZES

from hp_dtensor.plan import ShardingPlan
from hp_planner.cli import main

SMALL = [f"{name}={SIZES[name]}" for name in ("hidden_size", "intermediate_size", "vocab_size")]
SMALL += ["num_attention_heads=4", "num_key_value_heads=2", "head_dim=16", "num_hidden_layers=3"]


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_model_type_is_planned_and_printed(capsys):
    status, out, err = run(capsys, "qwen3", "--mesh", "tp=2,dp_shard=2", "--set", *SMALL)
    assert (status, err) == (0, "")
    assert "model.layers.{0..2}.mlp.down_proj.weight" in out
    assert "all-gather" in out
    assert "on tp=2 x dp_shard=2" in out


def test_a_class_name_and_a_config_file_give_the_same_plan(capsys, tmp_path):
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    values |= {name: json.loads(value) for name, value in (e.split("=") for e in SMALL)}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    _, by_file, _ = run(capsys, str(path), "--mesh", "tp=2")
    _, by_class, _ = run(capsys, "LlamaForCausalLM", "--mesh", "tp=2", "--set", *SMALL)
    assert by_file == by_class
    assert "LlamaForCausalLM" in by_file


def test_the_plan_is_written_as_yaml(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    status, out, _ = run(capsys, "qwen3", "--mesh", "tp=2", "--set", *SMALL, "--yaml", str(path))
    assert status == 0
    assert ShardingPlan.from_yaml(path.read_text()).digest in out


def test_overrides_and_options_reach_the_planner(capsys, tmp_path):
    path = tmp_path / "overrides.yaml"
    path.write_text("lm_head: none\n")
    options = ["--overrides", str(path), "--no-sequence-parallel"]
    status, out, _ = run(capsys, "qwen3", "--mesh", "tp=2", "--set", *SMALL, *options)
    assert status == 0
    assert "left whole by an override" in out
    assert "S(1) " not in out.split("Boundaries")[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["phi3", "--mesh", "tp=2", "--set", "num_hidden_layers=1"], "fused q, k and v"),
        (["qwen3", "--mesh", "tp=2,ep=2", "--set", *SMALL], "fused experts to share"),
        (["qwen3", "--mesh", "tp=3", "--set", *SMALL], "2 key/value heads"),
        (["qwen3", "--mesh", "tp=2", "--set", *SMALL, "--overrides", "/nowhere.yaml"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_ends_with_status_1(capsys, arguments, text):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert text in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["qwen33", "--mesh", "tp=2"], "'qwen33' is neither"),
        (["/nowhere.json", "--mesh", "tp=2"], "cannot read"),
        (["qwen3", "--mesh", "tp"], "name=size"),
        (["qwen3", "--mesh", "tp=2,tp=2"], "given twice"),
        (["qwen3", "--mesh", "tp=2", "--set", "hidden_sise=64"], "no hidden_sise"),
        (["qwen3", "--mesh", "tp=2", "--set", "hidden_size"], "NAME=VALUE"),
        (["t5", "--mesh", "tp=2"], "no causal language model"),
        (["qwen3", "--mesh", "tp=2", "--set", "hidden_size=true"], "cannot be built"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(capsys, arguments, text):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert text in err
    assert len(err.splitlines()) == 1


def test_a_missing_mesh_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["qwen3"])
    assert caught.value.code == 2
    assert "--mesh" in capsys.readouterr().err
