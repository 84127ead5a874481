"""Gradient equivalence, and a catalogue of planted sharding faults that must not get past it.

Every fault must be stopped by validate mode or by the report, with the faulty place named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from dtensor_block import (
    HIDDEN,
    INNER,
    PENDING,
    SUMMED,
    WHOLE,
    Layer,
    Norm,
    Tiny,
    batch,
    cut,
    loss_of,
    tiny_plan,
    with_boundary,
    with_parameter,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial

from hp_dtensor.contracts import ContractError
from hp_dtensor.dtensor import DTensor
from hp_dtensor.equivalence import EquivalenceError, GradientReport, check_gradients
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import (
    BoundaryTensor,
    Contract,
    LocalAttribute,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)
from hp_dtensor.rules.engine import OperatorError
from hp_platform import AgreementError, MeshAxis, Origin, barrier
from hp_platform.testing import run_ranks

AVERAGED = Contract({"tp": Partial("avg")})
OPAQUE = Region(RegionKind.OPAQUE)
Change = Callable[[ShardingPlan], ShardingPlan]


@frozen
class Fault:
    """A change of a good plan or module, and the message that must name the place."""

    change: Change
    message: str
    stops: type[Exception] | tuple[type[Exception], ...] | None = ContractError
    model: Callable[[], nn.Module] = Tiny
    sequence_parallel: bool = True


def parameter(name: str, contract: Contract) -> Change:
    return lambda plan: with_parameter(plan, name, contract=contract)


def changed(module: str, direction: str, where: str, **changes: Any) -> Change:
    """One tensor of one boundary, changed."""

    def change(plan: ShardingPlan) -> ShardingPlan:
        tensors = getattr(plan.boundary(module), direction)
        assert any(tensor.where == where for tensor in tensors)
        new = [evolve(t, **changes) if t.where == where else t for t in tensors]
        return with_boundary(plan, module, **{direction: new})

    return change


def opaque(module: str) -> Change:
    return lambda plan: with_boundary(plan, module, region=OPAQUE)


def both(*changes: Change) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        for each in changes:
            plan = each(plan)
        return plan

    return change


def output_bias(plan: ShardingPlan) -> ShardingPlan:
    """The output projection's bias, replicated beside a weight that is cut by columns."""
    extra = [
        ParameterSpec(f"layers.{i}.attention.o.bias", "bias", (HIDDEN,), WHOLE, "")
        for i in range(2)
    ]
    return evolve(plan, parameters=[*plan.parameters, *extra])


class LosesLayout(Norm):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result.to_local() if isinstance(result, DTensor) else result


class Detour(Layer):
    """Takes the local part of what the attention gave, as code outside torch functions may."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.first(x), positions=positions)[0]
        second = self.second(x)
        plain = second.to_local() if isinstance(second, DTensor) else second
        return x + self.mlp(plain)


def with_layer(kind: type[nn.Module], attribute: str) -> nn.Module:
    model = Tiny()
    target: Any = model.layers[0]
    new: Any = kind(HIDDEN) if attribute == "first" else kind()
    if attribute:
        new.load_state_dict(getattr(target, attribute).state_dict())
        setattr(target, attribute, new)
    else:
        new.load_state_dict(target.state_dict())
        model.layers[0] = new
    return model


ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"

FAULTS: dict[str, Fault] = {
    "weight cut along the wrong dim": Fault(
        parameter(f"{ATTENTION}.o.weight", cut(0)), "in module layers.0.attention.o", OperatorError
    ),
    "one of q, k, v left whole": Fault(
        both(
            parameter(f"{ATTENTION}.k.weight", WHOLE),
            parameter(f"{ATTENTION}.k.bias", WHOLE),
        ),
        "in module layers.0.attention",
        (OperatorError, ContractError),
    ),
    "bias not cut with its weight": Fault(
        parameter(f"{ATTENTION}.q.bias", WHOLE), "in module layers.0.attention.q", OperatorError
    ),
    "bias added once per rank": Fault(
        output_bias,
        "in module layers.0.attention.o",
        OperatorError,
        partial(Tiny, bias=True),
    ),
    "reduction missing on exit": Fault(
        changed(ATTENTION, "outputs", "0", inside=cut(1)),
        r"boundary layers.0.attention, output '0': expected tp: S\(1\), found tp: P\(sum\)",
    ),
    "reduction missing between neighbours": Fault(
        changed(ATTENTION, "outputs", "0", outside=PENDING), "in module layers.0", OperatorError
    ),
    "reduction missing after the embedding": Fault(
        changed("embed", "outputs", "", inside=WHOLE),
        r"boundary embed, output '': expected R, found tp: P\(sum\)",
    ),
    "reduction twice": Fault(
        parameter("embed.weight", WHOLE),
        r"boundary embed, output '': expected tp: P\(sum\), found R",
    ),
    "reduction with another operation": Fault(
        changed(ATTENTION, "outputs", "0", inside=AVERAGED),
        r"output '0': expected tp: P\(avg\), found tp: P\(sum\)",
    ),
    "head's output taken for another dim": Fault(
        changed("head", "outputs", "", inside=cut(1)), r"boundary head, output '': expected"
    ),
    "sum of gradients missing on entry": Fault(
        changed(ATTENTION, "inputs", "x", inside=WHOLE),
        "in module layers.0.attention.q",
        OperatorError,
    ),
    "sum of gradients missing at the head": Fault(
        both(
            changed("head", "inputs", "input", inside=WHOLE, outside=WHOLE),
            changed("norm", "outputs", "", outside=WHOLE),
        ),
        "in module head",
        OperatorError,
    ),
    "parameter's gradient not declared a summand": Fault(
        parameter(f"{ATTENTION}.q_norm.weight", WHOLE),
        "in module layers.0.attention.q_norm",
        OperatorError,
    ),
    "parameter's gradient declared a summand and is none": Fault(
        parameter("layers.0.first.weight", SUMMED),
        "layers.0.first",
        (OperatorError, ContractError),
        sequence_parallel=False,
    ),
    "neighbours disagree": Fault(
        changed("norm", "inputs", "x", outside=WHOLE),
        r"boundary norm, input 'x': expected R, found tp: S\(1\).*made by boundary layers.1, "
        r"which declares tp: S\(1\) outside",
    ),
    "inputs swapped": Fault(
        changed(MLP, "inputs", "x", outside=SUMMED, inside=cut(1)),
        r"boundary layers.0.mlp, input 'x': expected tp: R \(gradient P\(sum\)\), "
        r"found tp: S\(1\).*made by boundary layers.0.second",
    ),
    "layout lost on exit": Fault(
        lambda plan: plan,
        "boundary layers.0.first, output '': a plain tensor .* lost its layout",
        model=partial(with_layer, LosesLayout, "first"),
    ),
    "layout lost on the way": Fault(
        lambda plan: plan,
        "boundary layers.0.mlp, input 'x': a plain tensor .* lost its layout",
        model=partial(with_layer, Detour, ""),
    ),
    "size not localized": Fault(
        lambda plan: with_boundary(plan, ATTENTION, localize=[]),
        "in module layers.0.attention",
        RuntimeError,
    ),
    "another size localized": Fault(
        lambda plan: with_boundary(plan, ATTENTION, localize=[LocalAttribute("heads", "tp", 2)]),
        "boundary layers.0.attention: attribute 'heads' is 4",
        ValueError,
    ),
    # Inside an opaque region the plan is trusted; only values show the fault.
    "opaque: sections cut as one": Fault(
        parameter(f"{MLP}.gate_up", cut(0)), "output of boundary layers.0.mlp", None
    ),
    "opaque: sections of other lengths": Fault(
        parameter(f"{MLP}.gate_up", Contract({"tp": SectionedShard(0, (INNER + 4, INNER - 4))})),
        "output of boundary layers.0.mlp",
        None,
    ),
    "opaque: reduction twice": Fault(
        both(parameter(f"{MLP}.gate_up", WHOLE), parameter(f"{MLP}.down", WHOLE)),
        "output of boundary layers.0.mlp",
        None,
    ),
    "opaque: reduction with another operation": Fault(
        changed(MLP, "outputs", "", inside=AVERAGED), "output of boundary layers.0.mlp", None
    ),
    "opaque: sum of gradients missing on entry": Fault(
        changed(MLP, "inputs", "x", inside=WHOLE),
        "gradient of the output of boundary layers.0.second",
        None,
    ),
    "opaque: parameter's gradient not summed": Fault(
        both(opaque(ATTENTION), parameter(f"{ATTENTION}.q_norm.weight", WHOLE)),
        "gradient of layers.0.attention.q_norm.weight",
        None,
    ),
    "opaque: parameter's gradient summed twice": Fault(
        both(opaque("layers.0.first"), parameter("layers.0.first.weight", SUMMED)),
        "gradient of layers.0.first.weight",
        None,
        sequence_parallel=False,
    ),
    "opaque: bias added once per rank": Fault(
        both(output_bias, opaque(ATTENTION), opaque("layers.1.attention")),
        "output of boundary layers.0.attention",
        None,
        partial(Tiny, bias=True),
    ),
}


def caught(fault: Fault) -> tuple[str, str]:
    """What stops the fault (an exception's type, or "report"), and what is said."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = fault.change(tiny_plan({"tp": 2}, sequence_parallel=fault.sequence_parallel))
    try:
        report = check_gradients(fault.model, plan, mesh, batch(), loss_of)
    except Exception as error:
        expected = fault.stops or ()
        kind = "expected" if isinstance(error, expected) else type(error).__name__
        return kind, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ("report" if not report.ok else "nothing"), report.first_difference or ""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[tuple[str, str]]]:
    """All faults in one group of ranks: what each of the two ranks saw."""
    found = run_ranks(lambda: {name: caught(fault) for name, fault in FAULTS.items()}, 2)
    return {name: [each[name] for each in found] for name in FAULTS}


@pytest.mark.ranks
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_its_place_named(
    name: str, verdicts: dict[str, list[tuple[str, str]]]
) -> None:
    fault = FAULTS[name]
    for kind, message in verdicts[name]:
        assert kind == ("expected" if fault.stops else "report"), message
        assert re.search(fault.message, message, re.DOTALL), message


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
