"""Every planted fault of the catalogue is stopped, and what stops it names the place.

The ranks are simulated in one process, so that a fault costs a fraction of a second; a few of
every kind also run on ranks with a process group, which must see the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from dtensor_block import batch, loss_of, tiny_plan
from fault import Fault
from fault_catalogue import FAULTS
from faulty_modules import Unlabelled
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import transition
from hp_dtensor.equivalence import check_gradients
from hp_dtensor.errors import PlanError
from hp_dtensor.testing.lockstep import run_lockstep
from hp_platform.testing import run_ranks

ON_REAL_RANKS = list(FAULTS)[:: max(1, len(FAULTS) // 9)]


def loss(model: Any, data: Any) -> Any:
    if isinstance(model, Unlabelled):
        return model(data["ids"])["logits"].logsumexp(-1).sum()
    return loss_of(model, data)


def caught(fault: Fault, mesh: Any) -> tuple[str, str]:
    """What stops the fault, and what is said."""
    good = tiny_plan({"tp": 2}, sequence_parallel=fault.sequence_parallel)
    try:
        report = check_gradients(fault.model, fault.change(good), mesh, batch(), loss)
    except Exception as error:
        kind = "plan" if isinstance(error, PlanError) else "error"
        return kind, "\n".join([str(error), *getattr(error, "__notes__", ())])
    said = f"{report.first_difference or ''}\n{report.collectives or ''}"
    return ("report" if not report.ok else "nothing"), said


def check(name: str, kind: str, message: str) -> None:
    fault = FAULTS[name]
    assert kind != "nothing", "the fault passed validate and production"
    assert fault.stops in (kind, "any"), f"stopped by {kind}: {message}"
    assert re.search(fault.message, message, re.DOTALL), message


@pytest.fixture(autouse=True)
def _fresh_paths() -> Iterator[None]:
    """A planted fault must not be answered from, or stay in, the memo of compiled paths."""
    transition._compiled_steps.cache_clear()
    yield
    transition._compiled_steps.cache_clear()


def simulated(fault: Fault) -> list[tuple[str, str]]:
    with fault.plant():
        try:
            return run_lockstep(lambda mesh: caught(fault, mesh), {"tp": 2})
        except ValueError as error:  # the plan itself cannot be made
            return [("plan", str(error))]


def test_the_catalogue_has_at_least_eighty_faults() -> None:
    assert len(FAULTS) >= 80


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_its_place_named(name: str) -> None:
    for kind, message in simulated(FAULTS[name]):
        check(name, kind, message)


@pytest.mark.ranks
def test_real_ranks_catch_the_same_faults() -> None:
    def body() -> dict[str, tuple[str, str]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for name in ON_REAL_RANKS:
            transition._compiled_steps.cache_clear()
            with FAULTS[name].plant():
                found[name] = caught(FAULTS[name], mesh)
        return found

    for found in run_ranks(body, 2):
        for name, (kind, message) in found.items():
            check(name, kind, message)
