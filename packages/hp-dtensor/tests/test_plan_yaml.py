"""The plan's text form: exact both ways, with errors that name the key."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard, describe
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)
from hp_dtensor.plan_yaml import from_yaml, parse_placement, to_yaml

AXES = ("dp_shard", "tp", "ep", "on")

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
dims = st.integers(-4, 4)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def placements() -> st.SearchStrategy[Placement]:
    return st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.sampled_from([Partial(op) for op in ("sum", "avg", "max", "min")]),
        st.builds(StridedShard, dims, st.integers(1, 8)),
        st.builds(SectionedShard, dims, lengths),
        st.builds(lambda n, units: RaggedShard(range(n), units), st.integers(1, 3), lengths),
    )


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    chosen = draw(st.dictionaries(st.sampled_from(AXES), placements(), max_size=3))
    replicated = [a for a in AXES if isinstance(chosen.get(a, Replicate()), Replicate)]
    grads = draw(st.lists(st.sampled_from(replicated), unique=True)) if replicated else []
    return Contract(
        chosen, {axis: Partial(draw(st.sampled_from(["sum", "avg"]))) for axis in grads}
    )


boundary_tensors = st.builds(
    BoundaryTensor, names, contracts(), contracts(), plain=st.booleans(), optional=st.booleans()
)


def plans() -> st.SearchStrategy[ShardingPlan]:
    return st.builds(
        ShardingPlan,
        model=names,
        mesh=st.permutations(AXES).map(lambda axes: AbstractMesh(axes, (2, 3, 1, 4))),
        model_axes=st.lists(st.sampled_from(AXES), unique=True),
        parameters=st.lists(
            st.builds(
                ParameterSpec,
                name=names,
                role=names,
                shape=st.lists(st.integers(0, 99), max_size=3),
                contract=contracts(),
                boundary=names,
                reason=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
            ),
            max_size=3,
        ),
        boundaries=st.lists(
            st.builds(
                BoundarySpec,
                module=names,
                kind=st.sampled_from(BoundaryKind),
                inputs=st.lists(boundary_tensors, max_size=2),
                outputs=st.lists(boundary_tensors, max_size=2),
                localize=st.lists(
                    st.builds(LocalAttribute, names, st.sampled_from(AXES), st.integers(1, 99)),
                    max_size=1,
                ),
                region=st.none() | st.builds(Region, st.sampled_from(RegionKind), names),
                reason=names,
            ),
            max_size=3,
        ),
        tied=st.lists(st.lists(names, min_size=2, max_size=3), max_size=1),
    )


def example() -> ShardingPlan:
    hidden = BoundaryTensor(
        "hidden_states", Contract({"tp": Shard(1)}), Contract({}, {"tp": Partial()})
    )
    return ShardingPlan(
        model="Tiny",
        mesh=AbstractMesh(("dp_shard", "tp"), (2, 2)),
        model_axes=("tp",),
        parameters=[
            ParameterSpec(
                "mlp.up.weight",
                "fused_gate_up",
                (8, 4),
                Contract({"tp": SectionedShard(0, (4, 4))}),
                "mlp",
                "rule 3",
            )
        ],
        boundaries=[BoundarySpec("mlp", BoundaryKind.MLP, inputs=[hidden])],
    )


@given(placements())
def test_the_text_of_a_placement_reads_back_as_the_placement(placement: Placement) -> None:
    assert parse_placement(describe(placement)) == placement


@settings(deadline=None, max_examples=50)
@given(plans())
def test_a_plan_survives_yaml_exactly(plan: ShardingPlan) -> None:
    restored = from_yaml(to_yaml(plan))
    assert restored == plan
    assert restored.digest == plan.digest


def test_the_yaml_reads_like_the_plan() -> None:
    text = to_yaml(example())
    assert "mesh: {dp_shard: 2, tp: 2}" in text
    assert "contract: {tp: 'Sec(0,[4,4])'}" in text
    assert "outside: {tp: S(1)}" in text
    assert "inside: {tp: R grad P(sum)}" in text


def test_the_digest_is_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "import sys; from hp_dtensor.plan import ShardingPlan\n"
        "print(hash('a'), ShardingPlan.from_yaml(sys.stdin.read()).digest)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        input=to_yaml(example()),
        env={**os.environ, "PYTHONHASHSEED": "20240229"},
        capture_output=True,
        text=True,
        check=True,
    )
    seen, digest = answer.stdout.split()
    assert int(seen) != hash("a")
    assert digest == example().digest


def test_the_digest_sees_the_order_of_the_mesh_axes() -> None:
    text = to_yaml(example())
    swapped = text.replace("{dp_shard: 2, tp: 2}", "{tp: 2, dp_shard: 2}")
    assert from_yaml(swapped).digest != example().digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("role:", "rule:", r"unknown key 'rule'.*parameters\[0\]"),
        ("  role: fused_gate_up\n", "", r"'role' is missing.*parameters\[0\]"),
        ("tp: S(1)", "tp: S<1>", r"mesh axis 'tp': 'S<1>' is not a placement.*inputs\[0\].outside"),
        ("kind: mlp", "kind: mpl", r"'mpl' is not a valid BoundaryKind.*boundaries\[0\].kind"),
        ("shape: [8, 4]", "shape: [8, four]", r"list of sizes.*parameters\[0\].shape"),
        ("mesh: {dp_shard: 2, tp: 2}", "mesh: {tp: two}", r"mesh axis 'tp'.*plan.mesh"),
        ("boundary: mlp", "boundary: 3", r"expected str, found 3.*boundary"),
        ("model: Tiny", "model: Tiny\nmodel: Other", r"key 'model' occurs twice"),
        ("hp-sharding-plan/1", "hp-sharding-plan/9", r"expected key 'format'"),
    ],
)
def test_an_error_names_the_offending_key(old: str, new: str, message: str) -> None:
    text = to_yaml(example())
    assert old in text
    with pytest.raises(ValueError, match=f"(?s){message}"):
        from_yaml(text.replace(old, new, 1))


def test_text_that_is_not_yaml_is_refused() -> None:
    with pytest.raises(ValueError, match="not YAML"):
        from_yaml("format: [")
