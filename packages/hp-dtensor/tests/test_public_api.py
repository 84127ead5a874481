"""The package's public names, and what importing it loads."""

import subprocess
import sys

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


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_function_is_not_hidden_by_the_module_of_its_name() -> None:
    code = (
        "from hp_dtensor.parallelize import parallelize as defined; import hp_dtensor;"
        "assert hp_dtensor.parallelize is defined"
    )
    assert run_python(code) == ""


def test_the_algebra_loads_no_operator_rules() -> None:
    code = (
        "import sys, hp_dtensor; hp_dtensor.Layout; hp_dtensor.Transition;"
        "hp_dtensor.settle_gradients;"
        "print([m for m in sys.modules if m.startswith('hp_dtensor')])"
    )
    loaded = run_python(code)
    for module in ("dispatch", "dtensor", "rules", "parallelize", "plan", "testing"):
        assert f"'hp_dtensor.{module}'" not in loaded
