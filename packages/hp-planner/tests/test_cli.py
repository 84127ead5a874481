"""hp-plan: output, files and exit codes."""

import json
import sys

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


def test_a_python_factory_of_the_current_folder_takes_the_settings_as_arguments(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "factory_here.py").write_text("from planner_models import model\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    status, out, err = run(
        capsys, "factory_here:model", "--mesh", "tp=2", "--set", "model_type=qwen3"
    )
    assert (status, err) == (0, "")
    assert "Qwen3ForCausalLM" in out


def test_with_a_sequence_length_bytes_and_memory_are_printed(capsys):
    cost = ["--seq-len", "64", "--batch", "2"]
    status, out, _ = run(capsys, "qwen3", "--mesh", "tp=2,dp_shard=2", "--set", *SMALL, *cost)
    assert status == 0
    assert "A step of 2 sequences of 64 tokens a data-parallel rank, 4 bytes an element\n" in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    assert "memory per rank" in out
    assert "average message" in out


def test_the_plan_is_drawn_as_a_page(capsys, tmp_path):
    page = tmp_path / "plan.html"
    arguments = ["--quiet", "--html", str(page), "--seq-len", "64"]
    status, out, _ = run(capsys, "qwen3", "--mesh", "tp=2", "--set", *SMALL, *arguments)
    assert (status, out) == (0, "")
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_plan_that_differs_from_a_saved_one_ends_with_status_3(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    base = ["qwen3", "--mesh", "tp=2", "--set", *SMALL]
    assert run(capsys, *base, "--yaml", str(path))[0] == 0
    same = run(capsys, *base, "--quiet", "--against", str(path))
    assert same[0] == 0
    assert "the plans are equal" in same[1]
    other = run(capsys, *base, "--quiet", "--no-sequence-parallel", "--against", str(path))
    assert other[0] == 3
    assert "boundary model.layers.{0..2}.mlp: input" in other[1]


def test_validation_runs_every_operator_without_values(capsys):
    status, out, err = run(
        capsys, "llama", "--mesh", "tp=2", "--set", *SMALL, "--quiet", "--validate"
    )
    assert (status, err) == (0, "")
    assert "holds on tp=2" in out


def test_a_plan_that_validation_finds_wrong_ends_with_status_4(capsys, tmp_path):
    """An override declares a gradient a summand which every rank has whole; lint trusts it."""
    path = tmp_path / "overrides.yaml"
    arguments = ["planner_models:scaled", "--mesh", "tp=2", "--quiet", "--validate"]
    path.write_text('"*.scale": {tp: R grad P}\n')
    status, _, err = run(capsys, *arguments, "--overrides", str(path))
    assert status == 4
    assert "gradient" in err
    path.write_text('"*.scale": {tp: R}\n')
    assert run(capsys, *arguments, "--overrides", str(path))[0] == 0


def test_settings_may_use_any_name_that_the_config_answers_to(capsys):
    names = ["num_experts=4", "head_dim=16", "moe_intermediate_size=32", *SMALL[:-1]]
    status, out, err = run(capsys, "qwen3_moe", "--mesh", "ep=2", "--set", *names)
    assert (status, err) == (0, "")
    assert "ep: S(0)" in out


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
        (["planner_models:scaled", "--mesh", "tp=2"], "model.layers.{0..1}.scale"),
        (["qwen3", "--mesh", "tp=2,ep=2", "--set", *SMALL], "fused experts to share"),
        (["qwen3", "--mesh", "tp=3", "--set", *SMALL], "a multiple of tp=3"),
        (["qwen3", "--mesh", "tp=2", "--set", *SMALL, "--overrides", "/nowhere.yaml"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_ends_with_status_1(capsys, arguments, text):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert text in err


def test_a_class_of_several_model_types_is_suggested_once(capsys):
    status, _, err = run(capsys, "Qwen3MoeForCausalML", "--mesh", "tp=2")
    names = err.strip().partition("nearest: ")[2].split(", ")
    assert (status, names[0]) == (2, "Qwen3MoeForCausalLM")
    assert len(names) == len(set(names)) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["qwen33", "--mesh", "tp=2"], "'qwen33' is neither"),
        (["qwen33", "--mesh", "tp=2"], "nearest: qwen3"),
        (["/nowhere.json", "--mesh", "tp=2"], "cannot read"),
        (["nowhere.at:all", "--mesh", "tp=2"], "cannot be imported"),
        (["planner_models:nothing", "--mesh", "tp=2"], "cannot be imported"),
        (["planner_models:model", "--mesh", "tp=2"], "failed"),
        (["builtins:dict", "--mesh", "tp=2"], "returned a dict"),
        (["qwen3", "--mesh", "tp=2", "--against", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (
            ["qwen3", "--mesh", "tp=2", "--set", *SMALL, "--quiet", "--html", "/"],
            "cannot write",
        ),
        (["qwen3", "--mesh", "tp=2", "--set", *SMALL, "--seq-len", "7"], "cannot be cut"),
        (["qwen3"], "arguments are required: --mesh"),
        (["qwen3", "--mesh", "tp"], "name=size"),
        (["qwen33", "--mesh", "tp=two"], "needs a size"),
        (["qwen33", "--mesh", "tp=2", "--yaml", "/no/x"], "cannot write /no/x"),
        (["qwen3", "--mesh", "tp=2,tp=2"], "given twice"),
        (["qwen3", "--mesh", "tp=0"], "a size of at least 1"),
        (["qwen3", "--mesh", "tpp=2"], "unknown axis 'tpp', known are dp_replicate, dp_shard, tp"),
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
