"""What two plans do differently."""

from attrs import evolve
from planner_models import model

from hp_dtensor.plan import ShardingPlan, sharded
from hp_planner import diff, plan


def qwen(mesh=None, **options):
    return plan(model("qwen3", num_hidden_layers=3), mesh or {"tp": 2}, **options)


def test_equal_plans_have_no_difference():
    found = diff(qwen(), ShardingPlan.from_yaml(qwen().to_yaml()))
    assert not found
    assert "equal" in str(found)


def test_an_override_is_seen_in_parameters_and_boundaries_and_layers_are_folded():
    found = diff(qwen(), qwen(overrides={"*.mlp": "none"}))
    places = {(c.subject, c.what) for c in found.changes}
    assert ("parameter", "placement") in places
    assert ("boundary", "output") in places
    text = str(found)
    assert (
        "parameter model.layers.{0..2}.mlp.up_proj.weight: placement\n    - tp: S(0)\n    + R"
        in text
    )
    assert len(text.splitlines()) < 40


def test_another_mesh_names_the_mesh():
    found = diff(qwen(), qwen({"tp": 2, "dp_shard": 4}))
    (change,) = found.changes
    assert (change.subject, change.what) == ("plan", "mesh")
    assert change.after == "tp=2 x dp_shard=4"
    assert str(found).splitlines()[0].endswith(": 1 change")


def test_what_only_one_plan_has_is_added_or_removed():
    found = diff(qwen(), qwen({"dp_shard": 2}))
    removed = [c for c in found.changes if c.what == "removed"]
    assert {c.subject for c in removed} == {"boundary"}
    assert all(c.after == "(absent)" for c in removed)
    back = diff(qwen({"dp_shard": 2}), qwen())
    assert len([c for c in back.changes if c.what == "added"]) == len(removed)


def test_any_change_of_a_plan_is_a_difference():
    """Whatever moves the digest is told."""
    made = qwen()
    first, *others = made.parameters
    for changed in (
        evolve(made, parameters=(evolve(first, reason="another"), *others)),
        evolve(made, parameters=(evolve(first, contract=sharded("tp", 1)), *others)),
        evolve(made, parameters=(*others, first)),
        evolve(made, boundaries=made.boundaries[:-1]),
        evolve(made, model="Other"),
        evolve(made, tied=(("a", "b"),)),
    ):
        assert changed.digest != made.digest
        assert diff(made, changed)
