"""The package's public names."""

import pytest

import hp_dtensor

PUBLIC = [
    "AbstractMesh",
    "BoundaryKind",
    "BoundarySpec",
    "BoundaryTensor",
    "Contract",
    "ContractError",
    "DTensor",
    "EquivalenceError",
    "GradientReport",
    "Layout",
    "LocalAttribute",
    "MetaReport",
    "OperatorError",
    "ParameterSpec",
    "Partial",
    "Placement",
    "PlanError",
    "RaggedShard",
    "Region",
    "RegionKind",
    "Replicate",
    "SectionedShard",
    "Shard",
    "ShardingPlan",
    "StridedShard",
    "Transition",
    "attach_layout",
    "check_gradients",
    "describe",
    "distribute_tensor",
    "layout_of",
    "opaque_region",
    "parallelize",
    "settle_gradients",
    "transparent_region",
    "validate_on_meta",
]

TESTING = [
    "DistributedValue",
    "LockstepMesh",
    "RuleReport",
    "check_plan",
    "check_redistribute",
    "check_rule",
    "check_simulated",
    "collect",
    "distributed_tensors",
    "every_placement",
    "layouts",
    "meshes",
    "pairs_of",
    "placements",
    "run_lockstep",
    "shapes",
    "spread",
]


def test_public_names_are_these() -> None:
    assert sorted(hp_dtensor.__all__) == PUBLIC
    assert set(PUBLIC) == set(hp_dtensor._EXPORTS)
    assert set(PUBLIC) <= set(dir(hp_dtensor))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(hp_dtensor, name).__name__ == name


def test_submodules_load_by_name() -> None:
    assert hp_dtensor.testing.__name__ == "hp_dtensor.testing"


def test_the_public_names_of_the_fuzzing_kit_are_these() -> None:
    assert hp_dtensor.testing.__all__ == TESTING
    assert all(hasattr(hp_dtensor.testing, name) for name in TESTING)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Shrad'"):
        _ = hp_dtensor.Shrad
