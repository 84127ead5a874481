"""Override files: what can be written, and what is refused."""

import pytest
from torch.distributed.tensor import Partial, Shard

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import BoundaryKind, Contract
from hp_planner import PlanError
from hp_planner.override_file import Condition, Override, Sentinel, read_overrides


def one(value):
    (override,) = read_overrides({"a.b": value})
    return override


def test_words_and_placements_are_read():
    assert one("auto").value is Sentinel.AUTO
    assert one("none").value is Sentinel.NONE
    assert one({"tp": "S(0)"}).value == Contract({"tp": Shard(0)})
    assert one({"tp": "R grad P"}).value == Contract({}, {"tp": Partial()})
    assert one({"tp": "Sec(0,[4,2])"}).value == Contract({"tp": SectionedShard(0, (4, 2))})


def test_a_condition_goes_with_use_or_with_placements():
    when = {"axis": "tp", "min": 4, "boundary": "moe", "config": {"model_type": "qwen3_moe"}}
    condition = Condition("tp", 4, BoundaryKind.MOE, (("model_type", "qwen3_moe"),))
    assert one({"when": when, "use": "none"}) == Override("a.b", Sentinel.NONE, condition)
    found = one({"when": {"axis": "tp"}, "tp": "S(1)"})
    assert found == Override("a.b", Contract({"tp": Shard(1)}), Condition("tp"), axes=("tp",))


def test_a_file_is_read_and_a_repeated_key_in_it_is_refused(tmp_path):
    path = tmp_path / "overrides.yaml"
    path.write_text(
        "# the head stays whole\nlm_head: none\n'*.mlp': {when: {axis: tp}, use: none}\n"
    )
    assert [override.key for override in read_overrides(path)] == ["lm_head", "*.mlp"]
    path.write_text("lm_head: none\nlm_head: auto\n")
    with pytest.raises(PlanError, match="lm_head is given more than once"):
        read_overrides(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "write `none`"),
        ("replicate", "expected auto, none"),
        ({}, "expected auto, none"),
        ({"tp": "X(0)"}, "is not a placement"),
        ({"dp_shard": "S(0)"}, "is not a model axis"),
        ({"tp": "S(0) grad P"}, "cannot have a gradient"),
        ({"when": {"axis": "tp"}, "use": "none", "tp": "R"}, "either `use` or placements"),
        ({"when": {"axes": "tp"}, "use": "none"}, "`when` knows axis, min, boundary, config"),
        ({"when": {"axis": "tpp"}, "use": "none"}, "unknown axis 'tpp'"),
        ({"when": {"min": 2}, "use": "none"}, "`min` needs an `axis`"),
        ({"when": {"boundary": "attn"}, "use": "none"}, "no boundary kind 'attn'"),
        ({"when": {"config": 3}, "use": "none"}, "`config` takes names"),
    ],
)
def test_a_malformed_value_is_refused_by_name(value, text):
    with pytest.raises(PlanError, match=r"override 'a\.b'") as caught:
        read_overrides({"a.b": value})
    assert text in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read .*nowhere\.yaml"):
        read_overrides(tmp_path / "nowhere.yaml")
