"""Says in tables what a plan does and why: roles, placements, transitions, bytes.

Names that differ in layer numbers only share a row, so that a model of 48 layers fits a screen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch.distributed.tensor import Placement, Replicate

from hp_dtensor.placements import describe, is_sharding
from hp_dtensor.plan import BoundaryKind, Contract, ShardingPlan
from hp_planner.cost import (
    Workload,
    local_shape,
    memory,
    messages,
    operation,
    shard_axis,
    shard_elements,
    totals,
)
from hp_planner.expert_axis import DISPATCH
from hp_planner.folding import fold

Row = tuple[str, ...]
PARAMETER_COLUMNS = ("parameter", "role", "shape", "placement", "gradient", "why")
BOUNDARY_COLUMNS = ("boundary", "kind", "tensor", "outside", "inside", "forward", "backward")
# So few collectives of one kind are told with their place.
FEW = 2
COST_COLUMNS = ("axis", "collective", "messages a step", "bytes a step", "average message")


def explain(plan: ShardingPlan, workload: Workload | None = None, *, element_size: int = 4) -> str:
    """The plan as text: parameters and why, boundaries, collectives, bytes per rank.

    Args:
        workload: batch and sequence length; with it the text tells the bytes of a step by axis
            and the memory of a rank.
        element_size: bytes an element, for the summary without a workload; 4 is fp32.

    Raises:
        ValueError: the workload cannot be cut as the plan says.
    """
    rows = parameter_rows(plan)
    parts = [_table(PARAMETER_COLUMNS[:-1], [row[:-1] for row in rows]), reason_lines(rows)]
    if plan.boundaries:
        parts.append(_table(BOUNDARY_COLUMNS, boundary_rows(plan)))
    size = workload.element_size if workload is not None else element_size
    parts.append("\n".join(summary_lines(plan, element_size=size)))
    if workload is not None:
        table = _table(COST_COLUMNS, cost_rows(plan, workload))
        parts.append(f"{step_title(plan, workload)}\n{table}")
        parts.append("\n".join(memory_lines(plan, workload)))
    return "\n\n".join([str(plan), *parts])


def reason_lines(rows: Iterable[Row]) -> str:
    """Why each role, once; a reason that only some parameters of a role have names them."""
    by_role: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        by_role.setdefault(row[1], {}).setdefault(row[-1], []).append(row[0])
    lines = ["why"]
    for role, reasons in by_role.items():
        for reason, names in reasons.items():
            which = f" ({', '.join(names)})" if len(reasons) > 1 else ""
            lines.append(f"  {role}: {reason}{which}")
    return "\n".join(lines)


def parameter_rows(plan: ShardingPlan) -> tuple[Row, ...]:
    """One row for each folded name, in `PARAMETER_COLUMNS`."""
    groups = fold(
        plan.parameters,
        lambda spec: spec.name,
        lambda spec: (spec.role, spec.shape, spec.contract, spec.reason),
    )
    tied = {names[0]: names[1:] for names in plan.tied}
    rows = []
    for name, (spec, *_) in groups:
        others = tied.get(spec.name, ())
        label = f"{name} (= {', '.join(others)})" if others else name
        placement, gradient = _contract(spec.contract)
        shape = " x ".join(str(size) for size in spec.shape) or "()"
        rows.append((label, spec.role, shape, placement, gradient, spec.reason))
    return tuple(rows)


def boundary_rows(plan: ShardingPlan) -> tuple[Row, ...]:
    """One row for each folded boundary tensor that has a layout, in `BOUNDARY_COLUMNS`."""
    crossings = [
        (spec, tensor, direction)
        for spec in plan.boundaries
        for direction, tensors in (("in", spec.inputs), ("out", spec.outputs))
        for tensor in tensors
        if not tensor.plain
    ]
    groups = fold(
        crossings,
        lambda crossing: crossing[0].module,
        lambda crossing: (crossing[0].kind, crossing[1], crossing[2]),
    )
    rows: list[Row] = []
    for name, ((spec, tensor, direction), *_) in groups:
        place = f"{direction} {tensor.where or 'result'}"
        if tensor.outside == tensor.inside and rows and rows[-1][:2] == (name, spec.kind.value):
            last = rows[-1]
            if last[3] == last[4] == _with_gradient(tensor.outside):
                rows[-1] = (*last[:2], f"{last[2]}, {place}", *last[3:])
                continue
        ends = (tensor.outside, tensor.inside)
        source, target = ends if direction == "in" else ends[::-1]
        forward, backward = transition_words(source, target, plan.model_axes)
        rows.append(
            (
                name or "(model)",
                spec.kind.value,
                place,
                _with_gradient(tensor.outside),
                _with_gradient(tensor.inside),
                forward,
                backward,
            )
        )
    return tuple(rows)


def transition_words(source: Contract, target: Contract, axes: Iterable[str]) -> tuple[str, str]:
    """What a transition does to the value and, on the way back, to the gradient."""
    forward, backward = [], []
    for axis in axes:
        forward.append(_move(source.placement(axis), target.placement(axis)))
        backward.append(_move(target.grad_placement(axis), source.grad_placement(axis)))
    return (_joined(forward), _joined(backward))


def _joined(words: Sequence[str]) -> str:
    return ", ".join(word for word in words if word) or "-"


def _move(source: Placement, target: Placement) -> str:
    if source == target:
        return ""
    if isinstance(source, Replicate):
        return "slice" if is_sharding(target) else "keep one summand"
    return operation(source, target).replace("_", "-")


def _contract(contract: Contract) -> tuple[str, str]:
    placements = [f"{axis}: {describe(placement)}" for axis, placement in contract.placements]
    gradients = [f"{axis}: {describe(contract.grad_placement(axis))}" for axis in contract.axes()]
    return ", ".join(placements) or "R", ", ".join(gradients) or "R"


def _with_gradient(contract: Contract) -> str:
    value = _contract(contract)[0]
    grads = [f"{axis}: {describe(grad)}" for axis, grad in contract.grad_placements]
    return f"{value} (gradient {', '.join(grads)})" if grads else value


def collectives(plan: ShardingPlan) -> Counter[str]:
    """Boundary collectives of one forward and backward pass, by name."""
    counts: Counter[str] = Counter()
    for _, *phases in _crossings(plan):
        words = (word for words in phases for word in words.split(", "))
        counts.update(word for word in words if word not in ("-", "slice", "keep one summand"))
    return counts


def _places(plan: ShardingPlan) -> dict[str, list[str]]:
    """For each collective the modules on whose boundaries it is, with its phase."""
    found: dict[str, list[str]] = {}
    for module, forward, backward in _crossings(plan):
        for words, phase in ((forward, "forward"), (backward, "backward")):
            for word in words.split(", "):
                found.setdefault(word, []).append(f"{module or 'the model'}, {phase}")
    return found


def _crossings(plan: ShardingPlan) -> Iterable[tuple[str, str, str]]:
    """Module, and what its boundary does forward and backward, for every tensor."""
    for spec in plan.boundaries:
        for tensors, inward in ((spec.inputs, True), (spec.outputs, False)):
            for tensor in tensors:
                ends = (tensor.outside, tensor.inside)
                source, target = ends if inward else ends[::-1]
                if not tensor.plain:
                    yield spec.module, *transition_words(source, target, plan.model_axes)


def summary_lines(plan: ShardingPlan, *, element_size: int = 4) -> tuple[str, ...]:
    """Sizes, bytes per rank and collectives, a line each."""
    elements = sum(math.prod(spec.shape) for spec in plan.parameters)
    cut = sum(math.prod(local_shape(plan, spec)) for spec in plan.parameters)
    lines = [
        f"{len(plan.parameters)} parameters, {elements:,} elements, "
        f"{show_bytes(elements * element_size)} at {element_size} bytes an element",
        f"per rank: {show_bytes(cut * element_size)} of parameters after "
        f"{' x '.join(plan.model_axes) or 'no'} sharding",
    ]
    axes = sorted({shard_axis(plan, spec) for spec in plan.parameters})
    ways = ", ".join(f"{axis}={size}" for axis, size in axes if size > 1)
    if ways:
        held = sum(shard_elements(plan, spec) for spec in plan.parameters)
        lines.append(
            f"per rank: {show_bytes(held * element_size)} held between steps once fully_shard "
            f"cuts the rest over {ways}"
        )
    counts, places = collectives(plan), _places(plan)
    if counts:
        told = ", ".join(
            f"{count} {word}" + (f" ({', '.join(places[word])})" if count <= FEW else "")
            for word, count in sorted(counts.items())
        )
        lines.append(f"boundary collectives of one forward and backward pass: {told}")
    return tuple(lines)


def cost_rows(plan: ShardingPlan, workload: Workload) -> tuple[Row, ...]:
    """Messages and bytes of one step by axis and operation, in `COST_COLUMNS`.

    Raises:
        ValueError: the workload cannot be cut as the plan says.
    """
    found = totals(messages(plan, workload))
    return tuple(
        (axis, name.replace("_", "-"), str(count), show_bytes(size), show_bytes(size // count))
        for (axis, name), (count, size) in found.items()
    )


def step_title(plan: ShardingPlan, workload: Workload) -> str:
    """What the figures of a step and of the memory are for, in one line."""
    experts = any(spec.kind is BoundaryKind.EXPERTS for spec in plan.boundaries)
    return (
        f"A step of {workload.batch} {'sequence' if workload.batch == 1 else 'sequences'} of "
        f"{workload.sequence} tokens a data-parallel rank, "
        f"{workload.element_size} bytes an element{'; experts evenly loaded' if experts else ''}"
    )


def memory_lines(plan: ShardingPlan, workload: Workload) -> tuple[str, ...]:
    """Memory of one rank, a line each.

    Raises:
        ValueError: the workload cannot be cut as the plan says.
    """
    found = memory(plan, workload)
    lines = [
        f"memory per rank: {show_bytes(found.parameters)} parameters, "
        f"{show_bytes(found.gradients)} gradients, {show_bytes(found.optimizer)} optimizer state "
        f"({workload.optimizer_bytes} bytes an element), {show_bytes(found.held)} in all",
        f"activations kept for backward: at least {show_bytes(found.activations)} without "
        f"recomputation; parameters gathered at once: at most {show_bytes(found.gathered)}",
    ]
    if workload.experts_per_token is None and any(
        spec.region is not None and spec.region.function == DISPATCH for spec in plan.boundaries
    ):
        lines.append("expert traffic is left out: the number of experts of a token is not known")
    return tuple(lines)


def show_bytes(count: int) -> str:
    """`12.58 MB`: decimal units."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{int(size)} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def _table(columns: Row, rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in (columns, rule, *rows)
    )
