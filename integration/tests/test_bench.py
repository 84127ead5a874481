"""Benchmarks report in one form; a target that does not hold is reported, not hidden."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from hp_integration.bench import fsdp, host_overhead
from hp_integration.bench.__main__ import main
from hp_integration.bench.handwritten import HandwrittenBlock
from hp_integration.bench.muon import Case, lower_bound, measure, rows_of, targets_of
from hp_integration.bench.muon_peers import GatherAndRunEverywhere, adamw, installed, ours
from hp_integration.bench.pairs import interleaved, median_of_pairs, medians
from hp_integration.bench.result import BenchResult, Row, Target, geometric_mean
from hp_integration.models import build_model
from hp_platform.axis import MeshAxis
from hp_platform.testing import run_ranks

RESULT = BenchResult(
    "fsdp",
    [Row("hidden=128 ranks=2", 0.7, "FSDP2", 1.4, "s")],
    [Target("kept", 0.5, 0.75), Target("missed", 0.9, 0.75)],
)


def test_json_has_the_agreed_form() -> None:
    found = json.loads(RESULT.to_json())
    assert set(found) == {"bench", "machine", "rows", "targets"}
    assert set(found["machine"]) == {"cpu", "cores", "torch"}
    assert found["rows"] == [
        {"case": "hidden=128 ranks=2", "ours": 0.7, "peer": "FSDP2", "theirs": 1.4, "unit": "s",
         "ratio": 0.5}
    ]  # fmt: skip
    assert [target["holds"] for target in found["targets"]] == [True, False]


def test_a_missed_target_is_shown() -> None:
    console = Console(file=io.StringIO(), width=140)
    RESULT.print(console)
    assert "missed: 0.900, limit 0.75: DOES NOT HOLD" in console.file.getvalue()


def test_the_command_prints_one_json_object_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_overhead, "run", lambda quick: RESULT)
    assert main(["host-overhead", "--json", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "fsdp"


def test_sides_are_called_in_turn_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    sides = {name: (lambda n=name: calls.append(n)) for name in ("a", "b")}
    times = interleaved(sides, repeats=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert [len(values) for values in times.values()] == [2, 2]


def test_means() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


@pytest.mark.ranks
def test_the_muon_benchmark_measures_every_side_on_real_ranks() -> None:
    peers = installed("muon_fsdp2", "dtensor_muon", "muonium")
    plain = {"AdamW": adamw, "gather everywhere": GatherAndRunEverywhere}
    sides = {
        "FSDP4": {"ours": ours, **plain, **peers},
        "HSDP2x2": {"ours": ours},
        "TP2xFSDP2": {"ours": ours},
    }
    case = Case("small", ((8, 8), (8, 16), (16, 8), (4, 8, 8)), sides, {"FSDP4": 1.25})
    found = run_ranks(lambda: measure(case, 1), 4)[0]
    made = {(mesh, side) for mesh, names in sides.items() for side in names}
    assert set(found.state) == made
    assert set(found.wall) == set(found.cpu) == made | {("", "iteration alone")}
    assert all(value > 0 for value in (*found.wall.values(), *found.cpu.values()))
    # One momentum on each mesh, replicated or not; AdamW has two moments, and counts its steps.
    momentum = 4 * sum(math.prod(shape) for shape in case.shapes)
    assert {found.state[mesh, "ours"] for mesh in sides} == {momentum}
    assert found.state["FSDP4", "AdamW"] == 2 * momentum + 4 * 4 * len(case.shapes)
    for mesh in sides:
        assert found.wire[mesh, "fast"] >= lower_bound(case.shapes, mesh)
        assert 1 <= found.operations[mesh] < 4
    labels = {row.case for row in rows_of(case, found)}
    assert {"small HSDP2x2 work", "small TP2xFSDP2 fast bytes", "small FSDP4 wall"} <= labels
    assert any("1.25" in str(target.limit) for target in targets_of(case, found))


def test_the_lower_bound_counts_shards_to_owners_and_updates_back() -> None:
    assert lower_bound([(8, 8)], "FSDP4") == 2 * 2 * 64 * 3 / 4
    assert lower_bound([(4, 8, 8)], "FSDP4") == 0
    assert lower_bound([(8, 8)], "HSDP2x2") == 2 * 2 * 64 / 2 + 4 * 64


@pytest.mark.ranks
def test_the_handwritten_block_computes_what_the_whole_block_does() -> None:
    def body(rank: int) -> float:
        axis = MeshAxis.of_group()
        config = host_overhead._config(2)
        torch.manual_seed(1)
        hidden, positions = torch.randn(1, 16, 64), host_overhead._positions()
        whole = build_model(config, seed=0).get_submodule("model.layers.1")
        block = HandwrittenBlock(host_overhead._config(2), axis)
        _cut(whole, block.layer, rank)
        expected = whole(hidden, attention_mask=None, position_embeddings=positions)
        found = block(hidden[:, 8 * rank : 8 * rank + 8], None, positions)
        return float((found - expected[:, 8 * rank : 8 * rank + 8]).abs().max())

    assert max(run_ranks(body, 2)) < 1e-5


def _cut(whole: torch.nn.Module, part: torch.nn.Module, rank: int) -> None:
    """Copies this rank's half of every weight of `whole` into `part`."""
    with torch.no_grad():
        for name, target in part.named_parameters():
            source = whole.get_parameter(name)
            for dim in range(source.ndim):
                if source.shape[dim] != target.shape[dim]:
                    source = source.chunk(2, dim)[rank]
            target.copy_(source)


def test_the_median_pair_is_one_that_was_measured() -> None:
    times = {"ours": [1.0, 6.0, 3.0], "theirs": [4.0, 4.0, 4.0]}
    assert median_of_pairs(times) == {"ours": 3.0, "theirs": 4.0}


@pytest.mark.ranks
def test_a_sharded_step_packs_nothing_and_fsdp2_does() -> None:
    ours, theirs = run_ranks(lambda: fsdp._copies(64), 2)[0]
    assert ours == 0
    assert theirs > 0
