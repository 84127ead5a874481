"""Gradient equivalence of the dense model and both modes (paper section 4.5).

One training step is run on the whole model in this process, in validate mode and in production,
from the same values. Losses, every gradient and every boundary's outputs are compared. While a
step runs only this rank's pieces are recorded; they are gathered afterwards, so that the step
communicates as it does without the check, and the collectives of both modes can be compared too.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.contracts import (
    ModelAxes,
    global_shape,
    has_tensor,
    layout_under,
    map_tensors,
    read_output,
)
from hp_dtensor.dropouts import replace_dropouts
from hp_dtensor.dtensor import DTensor
from hp_dtensor.end_of_backward import settled_placements
from hp_dtensor.implicit import implicit
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.parallelize import parallelize
from hp_dtensor.placements import Replicate
from hp_dtensor.plan import BoundarySpec, BoundaryTensor, Contract, ShardingPlan
from hp_dtensor.plan_checks import check_plan
from hp_dtensor.transition import Transition
from hp_dtensor.validate import opaque_regions, trace_places
from hp_platform import HPError, Origin, Record, gather_objects, ledger
from hp_platform.agreement import agree

__all__ = ["Difference", "EquivalenceError", "GradientReport", "check_gradients"]

B = TypeVar("B")
MODES = ("validate", "production")


class EquivalenceError(HPError, AssertionError):
    """The modes, or a mode and the dense model, compute different values."""


@frozen
class Difference:
    """One compared tensor in one mode: the largest deviation from the reference on any rank.

    Attributes:
        mode: the mode that was compared.
        name: parameter, boundary output or "loss".
        deviation: largest absolute difference of an element; nan when a value is not finite or
            is missing.
        limit: `atol + rtol * largest absolute reference element`.
        note: what is missing, or differs otherwise.
    """

    mode: str
    name: str
    deviation: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.deviation <= self.limit and not self.note


@frozen
class GradientReport:
    """What `check_gradients` found; the same on every rank of the mesh.

    Attributes:
        losses: loss by mode, of this rank's batch; "dense" is the reference if it was run.
        gradients: one entry per mode and parameter.
        activations: one entry per mode and boundary output, in the order of the forward pass.
        backward: the same for gradients at boundary outputs, in the order of the backward pass.
        first_difference: where the modes begin to disagree, or None.
        collectives: what differs between the collectives of the two modes, or None.
    """

    losses: Mapping[str, float]
    gradients: tuple[Difference, ...]
    activations: tuple[Difference, ...]
    backward: tuple[Difference, ...]
    loss_differences: tuple[Difference, ...]
    first_difference: str | None
    collectives: str | None

    @property
    def ok(self) -> bool:
        """All losses and gradients agree, and both modes run the same collectives."""
        compared = (*self.loss_differences, *self.gradients)
        return all(each.ok for each in compared) and self.collectives is None

    def raise_if_failed(self) -> GradientReport:
        """Returns the report.

        Raises:
            EquivalenceError: `ok` is false; the message is the report.
        """
        if not self.ok:
            raise EquivalenceError(str(self))
        return self

    def __str__(self) -> str:
        lines = ["losses: " + ", ".join(f"{mode} {loss:.8g}" for mode, loss in self.losses.items())]
        failed = [each for each in (*self.loss_differences, *self.gradients) if not each.ok]
        if self.first_difference:
            lines.append(f"first difference: {self.first_difference}")
        if self.collectives:
            lines.append(f"collectives: {self.collectives}")
        lines += list(_table(self.gradients))
        verdict = "equal" if self.ok else f"DIFFERENT ({len(failed)} of the values compared)"
        return "\n".join([f"gradient equivalence: {verdict}", *lines])


def _table(rows: Sequence[Difference]) -> Iterator[str]:
    names = list(dict.fromkeys(row.name for row in rows))
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    if not names:
        return
    width = max(len(name) for name in (*names, "gradient"))
    yield "  ".join(
        [f"{'gradient':<{width}}", *(f"{mode:>12}" for mode in modes), f"{'limit':>12}"]
    )
    by_key = {(row.name, row.mode): row for row in rows}
    for name in names:
        found = [by_key[name, mode] for mode in modes if (name, mode) in by_key]
        cells = [f"{row.deviation:>11.3g}{' ' if row.ok else '!'}" for row in found]
        notes = "; ".join(dict.fromkeys(row.note for row in found if row.note))
        limit = max(row.limit for row in found)
        yield "  ".join([f"{name:<{width}}", *cells, f"{limit:>12.3g}", notes]).rstrip()


def check_gradients(
    make_model: Callable[[], nn.Module],
    plan: ShardingPlan,
    mesh: DeviceMesh | AbstractMesh,
    batch: B,
    loss_fn: Callable[[nn.Module, B], Tensor],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    dense: bool = True,
) -> GradientReport:
    """Runs one step in each mode and compares. Every rank of the mesh makes the call.

    Args:
        make_model: makes the whole model; called once per mode. Values are copied from the first,
            which must be the same on all ranks of the model axes.
        plan, mesh: as for `parallelize`.
        batch: this rank's batch, the same on all ranks of the model axes.
        loss_fn: scalar loss of a model and a batch. Of random numbers it may depend on what
            `nn.Dropout` modules draw, and on no others.
        rtol, atol: a tensor agrees when its largest deviation is at most
            `atol + rtol * (largest absolute element of the reference)`.
        dense: also run the whole model on every rank, as the reference. Without it, production
            is compared with validate mode.

    Returns:
        A report that is the same on every rank.

    Raises:
        PlanError, ContractError, OperatorError: as in validate mode; these name the place.
        AgreementError: the initial values differ between ranks of a model axis.
    """
    first = make_model()
    check_plan(first, plan, mesh, "validate")
    axes = ModelAxes.of(plan, mesh)
    state = copy.deepcopy(first.state_dict())
    _agree_on_values(state, axes)
    runs: dict[str, _Run] = {}
    if dense:
        replace_dropouts(first, plan, None, mesh)
        runs["dense"] = _run_dense(first, plan, batch, loss_fn)
    for mode in MODES:
        model = make_model()
        model.load_state_dict(state)
        parallelize(model, plan, mesh, mode=mode)  # type: ignore[arg-type]
        if mode == "production":
            trace_places(model)
        runs[mode] = _run_mode(model, plan, axes, mode, batch, loss_fn)
    reference = "dense" if dense else "validate"
    return _compare(runs, reference, mesh, rtol, atol)


def _agree_on_values(state: Mapping[str, object], axes: ModelAxes) -> None:
    """Sums in double precision, by position: enough to see that two initialisations differ."""
    sums = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):  # a module's extra state
            continue
        flat = value.detach().double().reshape(-1).cpu()
        weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).sqrt()
        sums[name] = (tuple(value.shape), float(flat @ weights))
    if isinstance(axes.mesh, DeviceMesh):
        for axis in range(axes.mesh.ndim):
            agree("the model's initial values", sums, mesh_axis(axes.mesh, axis))


# -- running -----------------------------------------------------------------------------------


@define(eq=False)
class _Piece:
    """This rank's part of a recorded tensor."""

    name: str
    local: Tensor
    layout: Layout


@define(eq=False)
class _Run:
    """What one step left behind."""

    loss: float
    gradients: dict[str, Tensor | None]
    activations: list[tuple[str, Tensor]]
    backward: list[tuple[str, Tensor]]
    records: tuple[Record, ...] = ()


@define(eq=False)
class _Recorder:
    """Records boundary outputs and the gradients that reach them, without communication."""

    axes: ModelAxes | None
    activations: list[_Piece] = field(factory=list)
    backward: list[_Piece] = field(factory=list)
    _seen: dict[str, int] = field(factory=dict)

    def watch(self, model: nn.Module, plan: ShardingPlan, skip: frozenset[str]) -> None:
        for spec in plan.boundaries:
            if spec.outputs and spec.module not in skip:
                model.get_submodule(spec.module).register_forward_hook(self._hook(spec))

    def _hook(self, spec: BoundarySpec) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in spec.outputs:
                value = read_output(output, tensor.where)
                if has_tensor(value):
                    map_tensors(functools.partial(self._record, spec, tensor), value)

        return record

    def _record(self, spec: BoundarySpec, declared: BoundaryTensor, tensor: Tensor) -> Tensor:
        name = f"boundary {spec.module or '(root)'}"
        name += f", output {declared.where!r}" if declared.where else ""
        call = self._seen[name] = self._seen.get(name, 0) + 1
        name += f", call {call}" if call > 1 else ""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        layout = self._layout(declared.outside, local)
        self.activations.append(_Piece(name, local.detach().clone(), layout))
        if local.requires_grad:
            gradient = layout.with_placements(layout.grad_placements)
            local.register_hook(
                lambda grad: self.backward.append(_Piece(name, grad.detach().clone(), gradient))
            )
        return tensor

    def _layout(self, contract: Contract, local: Tensor) -> Layout:
        if self.axes is None:
            return Layout(AbstractMesh((), ()), (), tuple(local.shape))
        shape = global_shape(contract, self.axes.abstract, tuple(local.shape))
        return layout_under(contract, self.axes.mesh, shape)


def _run_dense(
    model: nn.Module, plan: ShardingPlan, batch: B, loss_fn: Callable[[nn.Module, B], Tensor]
) -> _Run:
    recorder = _Recorder(None)
    recorder.watch(model, plan, frozenset())
    loss = loss_fn(model, batch)
    loss.backward()
    return _Run(
        float(loss.detach()),
        {spec.name: model.get_parameter(spec.name).grad for spec in plan.parameters},
        [(piece.name, piece.local) for piece in recorder.activations],
        [(piece.name, piece.local) for piece in recorder.backward],
    )


def _run_mode(
    model: nn.Module,
    plan: ShardingPlan,
    axes: ModelAxes,
    mode: str,
    batch: B,
    loss_fn: Callable[[nn.Module, B], Tensor],
) -> _Run:
    recorder = _Recorder(axes)
    # Inside an opaque region a boundary's shapes need not be pieces of the dense model's.
    recorder.watch(model, plan, _within(plan))
    with ledger() as log, implicit(reductions=mode != "validate", adjoints=mode != "validate"):
        loss = loss_fn(model, batch)
        loss.backward()
    # A simulated rank that is past its step writes to the ledgers of those that are not.
    records = tuple(r for r in log.records if r.origin.phase not in ("check", "agreement"))
    gradients = {}
    for spec in plan.parameters:
        parameter = model.get_parameter(spec.name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        layout = layout_under(spec.contract, axes.mesh, spec.shape)
        settled = layout.with_placements(settled_placements(layout))
        gradients[spec.name] = None if local.grad is None else _full(local.grad, settled)
    return _Run(
        float(loss.detach()),
        gradients,
        [(piece.name, _full(piece.local, piece.layout)) for piece in recorder.activations],
        [(piece.name, _full(piece.local, piece.layout)) for piece in recorder.backward],
        records,
    )


def _within(plan: ShardingPlan) -> frozenset[str]:
    regions = opaque_regions(plan)
    return frozenset(
        spec.module
        for spec in plan.boundaries
        if any(spec.module.startswith(f"{region}.") for region in regions)
    )


def _full(local: Tensor, layout: Layout) -> Tensor:
    """The global tensor. Where a layout says Replicate this rank's own value is kept: a copy that
    differs between ranks is then seen."""
    everywhere = layout.with_placements([Replicate()] * len(layout.placements))
    origin = Origin("hp_dtensor", "gradient equivalence", "check")
    transition = Transition.compile(layout, everywhere)
    with torch.no_grad():
        return transition.run_forward(local.detach(), origin=origin)


# -- comparing ---------------------------------------------------------------------------------


def _compare(
    runs: Mapping[str, _Run],
    reference: str,
    mesh: DeviceMesh | AbstractMesh,
    rtol: float,
    atol: float,
) -> GradientReport:
    truth = runs[reference]
    found: dict[str, list[Difference]] = {"loss": [], "gradient": [], "forward": [], "backward": []}
    for mode in MODES:
        if mode == reference:
            continue
        run = runs[mode]
        found["loss"].append(
            _difference(mode, "loss", torch.tensor(run.loss), torch.tensor(truth.loss), rtol, atol)
        )
        for name, expected in truth.gradients.items():
            found["gradient"].append(
                _difference(mode, name, run.gradients[name], expected, rtol, atol)
            )
        found["forward"] += _sequence(mode, run.activations, truth.activations, rtol, atol)
        found["backward"] += _sequence(mode, run.backward, truth.backward, rtol, atol)
    collectives = _ledgers(runs["validate"].records, runs["production"].records)
    shared, collectives = _on_every_rank(found, collectives, mesh)
    return GradientReport(
        losses={mode: run.loss for mode, run in runs.items()},
        gradients=tuple(shared["gradient"]),
        activations=tuple(shared["forward"]),
        backward=tuple(shared["backward"]),
        loss_differences=tuple(shared["loss"]),
        first_difference=_first(shared),
        collectives=collectives,
    )


def _difference(
    mode: str, name: str, found: Tensor | None, expected: Tensor | None, rtol: float, atol: float
) -> Difference:
    if found is None or expected is None:
        if found is None and expected is None:
            return Difference(mode, name, 0.0, atol)
        note = "no gradient" if found is None else "a gradient where the reference has none"
        return Difference(mode, name, math.nan, atol, note)
    if found.shape != expected.shape:
        note = f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        return Difference(mode, name, math.nan, atol, note)
    if expected.numel() == 0:
        return Difference(mode, name, 0.0, atol)
    wanted = expected.detach().double()
    deviation = float((found.detach().double() - wanted).abs().max())
    limit = atol + rtol * float(wanted.abs().max())
    note = "" if math.isfinite(deviation) else "not finite"
    return Difference(mode, name, deviation, limit, note)


def _sequence(
    mode: str,
    found: Sequence[tuple[str, Tensor]],
    expected: Sequence[tuple[str, Tensor]],
    rtol: float,
    atol: float,
) -> Iterator[Difference]:
    """In the reference's order; what one side lacks is compared with None."""
    mine = dict(found)
    for name, tensor in expected:
        yield _difference(mode, name, mine.get(name), tensor, rtol, atol)


def _ledgers(validate: Sequence[Record], production: Sequence[Record]) -> str | None:
    one = [_shown(record) for record in validate]
    other = [_shown(record) for record in production]
    for index, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return f"number {index} is {left} in validate mode, {right} in production"
    if len(one) != len(other):
        longer, mode = (one, "validate mode") if len(one) > len(other) else (other, "production")
        return f"only {mode} runs {longer[min(len(one), len(other))]}"
    return None


def _shown(record: Record) -> str:
    return f"{record.operation} over {record.axis}, {record.bytes} bytes, for {record.origin}"


def _on_every_rank(
    found: dict[str, list[Difference]], collectives: str | None, mesh: DeviceMesh | AbstractMesh
) -> tuple[dict[str, list[Difference]], str | None]:
    """The worst of all ranks for every value, so that all ranks report alike."""
    if isinstance(mesh, AbstractMesh):
        return found, collectives
    for axis in range(mesh.ndim):
        everyone = gather_objects(
            (found, collectives),
            mesh_axis(mesh, axis),
            origin=Origin("hp_dtensor", "gradient equivalence", "check"),
        )
        found = {
            kind: [max(same, key=_severity) for same in zip(*(each[kind] for each, _ in everyone))]
            for kind in found
        }
        collectives = next((text for _, text in everyone if text), None)
    return found, collectives


def _severity(difference: Difference) -> float:
    if difference.note:
        return math.inf
    return difference.deviation - difference.limit


def _first(found: Mapping[str, Sequence[Difference]]) -> str | None:
    """Forward before backward before parameters: a wrong output makes wrong gradients."""
    for kind, verb in (("forward", "output"), ("backward", "gradient of the output")):
        before = ""
        for difference in found[kind]:
            if not difference.ok:
                return _told(difference, f"{verb} of {difference.name}") + before
            before = f"; the one computed before it, of {difference.name}, agrees"
    for difference in (*found["loss"], *found["gradient"]):
        if not difference.ok:
            what = "the loss" if difference.name == "loss" else f"gradient of {difference.name}"
            return _told(difference, what)
    return None


def _told(difference: Difference, what: str) -> str:
    size = difference.note or f"by {difference.deviation:.3g}, limit {difference.limit:.3g}"
    return f"{what}, {difference.mode} mode: {size}"
