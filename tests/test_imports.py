"""What importing a package loads and what it does not need, in interpreters that only have torch.

One process imports torch and forks for each package: torch alone takes seconds to import.
"""

import subprocess
import sys

import pytest

ABSENT = ["torch_npu", "hypothesis", "pytest"]
OPERATORS = ["hp_dtensor.dtensor", "hp_dtensor.rules", "hp_dtensor.dispatch"]
OTHERS = ["hp_planner", "hp_fsdp", "hp_muon", "hp_integration", "transformers"]

# Statements, and what must not have been loaded by them.
CASES = {
    "hp_platform": (
        "import torch, hp_platform, hp_platform.devices, hp_platform.hccl\n"
        "import hp_platform.testing.conformance\n"
        "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()",
        ["hp_dtensor", *OTHERS],
    ),
    "the algebra of hp_dtensor": (
        "import hp_dtensor; hp_dtensor.Layout; hp_dtensor.Transition; hp_dtensor.settle_gradients",
        [*OPERATORS, "hp_dtensor.parallelize", "hp_dtensor.plan", "hp_dtensor.testing", *OTHERS],
    ),
    "a function of hp_dtensor beside its module": (
        "from hp_dtensor.parallelize import parallelize as defined; import hp_dtensor\n"
        "assert hp_dtensor.parallelize is defined",
        OTHERS,
    ),
    "hp_fsdp": ("import hp_fsdp", ["hp_planner", "hp_muon", "hp_integration", "transformers"]),
    "hp_muon": (
        "import hp_muon",
        [*OPERATORS, "hp_dtensor.parallelize", *{*OTHERS} - {"hp_muon"}],
    ),
    "hp_planner": ("import hp_planner", [*OPERATORS, *{*OTHERS} - {"hp_planner"}]),
}

PROGRAM = f"""
import os, sys, traceback
for name in {ABSENT}:
    sys.modules[name] = None
import torch, torch.distributed
for name, (statements, unwanted) in {CASES!r}.items():
    if (child := os.fork()) == 0:
        try:
            exec(statements, {{}})
            begin = tuple(f"{{name}}." for name in unwanted)
            found = [module for module in sys.modules if f"{{module}}.".startswith(begin)]
            assert not found, f"loads {{found}}"
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(f"{{name}}: {{os.waitpid(child, 0)[1]}}", flush=True)
"""


@pytest.fixture(scope="module")
def outcome() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=240
    )


@pytest.mark.parametrize("name", CASES)
def test_importing_loads_nothing_that_is_not_needed(
    name: str, outcome: subprocess.CompletedProcess[str]
) -> None:
    assert f"{name}: 0" in outcome.stdout.splitlines(), outcome.stderr
