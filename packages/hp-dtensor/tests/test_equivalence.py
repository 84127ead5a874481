"""Gradient equivalence, and a catalogue of planted sharding faults that must not get past it.

Every fault must be stopped by validate mode or by the report, with the faulty place named.
"""

from __future__ import annotations

import pytest
import torch
from dtensor_block import (
    WHOLE,
    Tiny,
    batch,
    loss_of,
    tiny_plan,
    with_boundary,
)
from fault_catalogue import FAULTS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.contracts import ContractError
from hp_dtensor.dtensor import DTensor
from hp_dtensor.equivalence import EquivalenceError, GradientReport, check_gradients
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import (
    BoundaryTensor,
)
from hp_platform import AgreementError, MeshAxis, Origin, barrier
from hp_platform.testing import run_ranks


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_good_plan_is_reported_equal(sequence_parallel: bool) -> None:
    def body() -> GradientReport:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = tiny_plan({"dp": 2, "tp": 2}, sequence_parallel=sequence_parallel)
        data = batch(8 + 2 * mesh.get_coordinate()[0])  # type: ignore[index]
        return check_gradients(Tiny, plan, mesh, data, loss_of).raise_if_failed()

    report = run_ranks(body, 4)[0]
    assert report.ok
    assert report.first_difference is None
    assert set(report.losses) == {"dense", "validate", "production"}
    text = str(report)
    assert "gradient equivalence: equal" in text
    assert "layers.1.attention.q_norm.weight" in text


def test_one_process_compares_both_modes_with_the_dense_model() -> None:
    report = check_gradients(
        Tiny, tiny_plan({"tp": 1}), AbstractMesh.of({"tp": 1}), batch(), loss_of
    )
    assert report.raise_if_failed() is report


@pytest.mark.ranks
def test_without_a_dense_run_the_modes_are_compared_with_each_other() -> None:
    def body() -> tuple[set[str], str | None]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        report = check_gradients(Tiny, tiny_plan({"tp": 2}), mesh, batch(), loss_of, dense=False)
        report.raise_if_failed()
        return set(report.losses), report.first_difference

    assert run_ranks(body, 2) == [({"validate", "production"}, None)] * 2


@pytest.mark.ranks
def test_a_failed_report_is_the_same_on_every_rank_and_raises() -> None:
    def body() -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = FAULTS["opaque: sections cut as one"].change(tiny_plan({"tp": 2}))
        report = check_gradients(Tiny, plan, mesh, batch(), loss_of)
        with pytest.raises(EquivalenceError) as error:
            report.raise_if_failed()
        return str(error.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert "DIFFERENT" in first
    assert "first difference: output of boundary layers.0.mlp, validate mode" in first


@pytest.mark.ranks
def test_a_collective_that_only_one_mode_runs_is_reported() -> None:
    def body() -> tuple[bool, str | None]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
            if isinstance(model.get_parameter("norm.weight"), DTensor):
                barrier(MeshAxis.of_mesh(mesh, "tp"), origin=Origin("planted"))
            return loss_of(model, data)

        report = check_gradients(Tiny, tiny_plan({"tp": 2}), mesh, batch(), loss)
        assert all(each.ok for each in report.gradients)
        return report.ok, report.collectives

    for ok, text in run_ranks(body, 2):
        assert not ok
        assert text is not None
        assert "number 0 is barrier over tp" in text
        assert "for planted in validate mode" in text


@pytest.mark.ranks
def test_initial_values_that_differ_between_ranks_stop_the_check() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def make() -> nn.Module:
            model = Tiny()
            nn.init.constant_(model.norm.weight, 1.0 + rank)
            return model

        with pytest.raises(AgreementError, match="initial values"):
            check_gradients(make, tiny_plan({"tp": 2}), mesh, batch(), loss_of)

    run_ranks(body, 2)


def test_a_tensor_for_an_unknown_boundary_output_is_an_error() -> None:
    plan = with_boundary(tiny_plan({"tp": 1}), "norm", outputs=[BoundaryTensor("1", WHOLE, WHOLE)])
    with pytest.raises((ContractError, LookupError), match="position 1 of a"):
        check_gradients(Tiny, plan, AbstractMesh.of({"tp": 1}), batch(), loss_of)
    assert torch.is_grad_enabled()
