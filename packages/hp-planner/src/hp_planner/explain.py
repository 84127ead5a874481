"""Says in tables what a plan does and why: roles, placements, transitions, bytes.

Names that differ in layer numbers only share a row, so that a model of 48 layers fits a screen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from attrs import frozen
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import describe, is_sharding
from hp_dtensor.plan import Contract, ParameterSpec, ShardingPlan
from hp_planner.folding import fold

Row = tuple[str, ...]
PARAMETER_COLUMNS = ("parameter", "role", "shape", "placement", "gradient", "why")
BOUNDARY_COLUMNS = ("boundary", "kind", "tensor", "outside", "inside", "forward", "backward")


@frozen
class Cost:
    """Parameter sizes of one plan; per rank means the rank that holds most.

    Attributes:
        tensors, elements: of the whole model.
        elements_per_rank: after the model axes have cut it.
        elements_per_shard: after `fully_shard` over `dp_shard` has cut each by its rows, too.
    """

    tensors: int
    elements: int
    elements_per_rank: int
    elements_per_shard: int


def explain(plan: ShardingPlan, *, element_size: int = 4) -> str:
    """The plan as text: parameters, boundaries, collectives, bytes per rank.

    Args:
        element_size: bytes an element, for the summary; 4 is fp32.
    """
    rows = parameter_rows(plan)
    parts = [_table(PARAMETER_COLUMNS[:-1], [row[:-1] for row in rows]), _reasons(rows)]
    if plan.boundaries:
        parts.append(_table(BOUNDARY_COLUMNS, boundary_rows(plan)))
    parts.append("\n".join(summary_lines(plan, element_size=element_size)))
    return "\n\n".join([str(plan), *parts])


def _reasons(rows: Iterable[Row]) -> str:
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
    if isinstance(source, Partial):
        return "all-reduce" if isinstance(target, Replicate) else "reduce-scatter"
    if isinstance(source, Replicate):
        return "slice" if is_sharding(target) else "keep one summand"
    return "all-to-all" if is_sharding(target) else "all-gather"


def _contract(contract: Contract) -> tuple[str, str]:
    placements = [f"{axis}: {describe(placement)}" for axis, placement in contract.placements]
    gradients = [f"{axis}: {describe(contract.grad_placement(axis))}" for axis in contract.axes()]
    return ", ".join(placements) or "R", ", ".join(gradients) or "R"


def _with_gradient(contract: Contract) -> str:
    value = _contract(contract)[0]
    grads = [f"{axis}: {describe(grad)}" for axis, grad in contract.grad_placements]
    return f"{value} (gradient {', '.join(grads)})" if grads else value


def cost(plan: ShardingPlan) -> Cost:
    """Elements in all, and on the rank that holds most."""
    return Cost(
        tensors=len(plan.parameters),
        elements=sum(math.prod(spec.shape) for spec in plan.parameters),
        elements_per_rank=sum(math.prod(_local_shape(plan, s)) for s in plan.parameters),
        elements_per_shard=sum(_shard_elements(plan, spec) for spec in plan.parameters),
    )


def _local_shape(plan: ShardingPlan, spec: ParameterSpec) -> tuple[int, ...]:
    placements, _ = spec.contract.on(plan.mesh)
    first = (0,) * plan.mesh.ndim
    return tuple(Layout(plan.mesh, placements, spec.shape).local_shape(first))


def _shard_elements(plan: ShardingPlan, spec: ParameterSpec) -> int:
    shape = _local_shape(plan, spec)
    names = plan.mesh.axis_names
    shards = plan.mesh.size("dp_shard") if "dp_shard" in names else 1
    if not shape:
        return 1
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def collectives(plan: ShardingPlan) -> Counter[str]:
    """Boundary collectives of one forward and backward pass, by name."""
    counts: Counter[str] = Counter()
    for row in _crossings(plan):
        counts.update(word for word in row if word not in ("-", "slice"))
    return counts


def _crossings(plan: ShardingPlan) -> Iterable[tuple[str, str]]:
    for spec in plan.boundaries:
        for tensor in spec.inputs:
            if not tensor.plain:
                yield transition_words(tensor.outside, tensor.inside, plan.model_axes)
        for tensor in spec.outputs:
            if not tensor.plain:
                yield transition_words(tensor.inside, tensor.outside, plan.model_axes)


def summary_lines(plan: ShardingPlan, *, element_size: int = 4) -> tuple[str, ...]:
    """Sizes, bytes per rank and collectives, a line each."""
    found = cost(plan)
    lines = [
        f"{found.tensors} parameters, {found.elements:,} elements, "
        f"{_bytes(found.elements * element_size)} at {element_size} bytes an element",
        f"per rank: {_bytes(found.elements_per_rank * element_size)} of parameters after "
        f"{' x '.join(plan.model_axes) or 'no'} sharding",
    ]
    if "dp_shard" in plan.mesh.axis_names and plan.mesh.size("dp_shard") > 1:
        lines.append(
            f"per rank: {_bytes(found.elements_per_shard * element_size)} held between steps once "
            f"fully_shard cuts the rest over dp_shard={plan.mesh.size('dp_shard')}"
        )
    counts = collectives(plan)
    if counts:
        told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        lines.append(f"boundary collectives of one forward and backward pass: {told}")
    return tuple(lines)


def _bytes(count: int) -> str:
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
