"""A plan as one self-contained HTML page: the module tree with its boundaries drawn.

A boundary is a box. On its upper edge stand the tensors that enter, on its lower edge those that
leave, each with its layout outside and inside and the collective between the two; inside are its
parts and its parameters, with a mark for every mesh axis. Layers that are alike are drawn once. No
script, no font and no picture is loaded: the page opens from a file, anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from hp_dtensor.placements import describe
from hp_dtensor.plan import BoundarySpec, BoundaryTensor, Contract, ParameterSpec, ShardingPlan
from hp_planner.cost import Workload, local_shape, messages
from hp_planner.explain import (
    cost_rows,
    memory_lines,
    show_bytes,
    step_title,
    summary_lines,
    transition_words,
)
from hp_planner.folding import fold_names
from hp_planner.module_tree import Branch, Variant, module_tree
from hp_planner.page_style import STYLE

Sizes = dict[tuple[str, str], int]


def html_page(plan: ShardingPlan, workload: Workload | None = None) -> str:
    """The page, UTF-8 text.

    Args:
        workload: batch and sequence length; with it the page shows bytes and memory.

    Raises:
        ValueError: the workload cannot be cut as the plan says.
    """
    sizes = _sizes(plan, workload)
    tree = module_tree(plan)
    body = [
        _head(plan),
        '<div class="columns">',
        _summary(plan, workload),
        _legend(plan),
        "</div>",
        '<h2>Modules</h2><div class="tree">',
        _branch(plan, tree, sizes, depth=0),
        "</div>",
    ]
    title = escape(f"{plan.model} on {plan.mesh}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def _sizes(plan: ShardingPlan, workload: Workload | None) -> Sizes:
    """Bytes that cross each boundary in each phase."""
    found: Sizes = {}
    for message in messages(plan, workload) if workload is not None else ():
        key = (message.where, message.phase)
        found[key] = found.get(key, 0) + message.bytes
    return found


# -- top of the page -----------------------------------------------------------------------------


def _head(plan: ShardingPlan) -> str:
    axes = "".join(
        f'<span class="axis {_axis_class(plan, name)}"><b>{escape(name)}</b> {size}</span>'
        for name, size in zip(plan.mesh.axis_names, plan.mesh.sizes)
    )
    return (
        f"<header><h1>{escape(plan.model)}</h1><p class=mesh>{axes}"
        f"<span class=quiet>{plan.mesh.world_size:,} ranks &middot; plan {plan.digest}</span></p>"
        "</header>"
    )


def _summary(plan: ShardingPlan, workload: Workload | None) -> str:
    size = workload.element_size if workload is not None else 4
    lines = list(summary_lines(plan, element_size=size))
    table = ""
    if workload is not None:
        lines += (step_title(plan, workload), *memory_lines(plan, workload))
        rows = "".join(
            f'<tr><td><span class="dot {_axis_class(plan, axis)}"></span>{escape(axis)}</td>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for axis, *cells in cost_rows(plan, workload)
        )
        table = (
            "<table class=cost><thead><tr><th>axis</th><th>collective</th><th>messages</th>"
            "<th>bytes a step</th><th>average message</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>Cost</h2>{table}<ul>{items}</ul></section>"


def _legend(plan: ShardingPlan) -> str:
    rows = [
        ("<span class='mark whole'>R</span>", "replicated: every rank holds all of it"),
        ("<span class='mark cut a0'>S(0)</span>", "sharded over the axis, along that dim"),
        ("<span class='mark sum a0'>P</span>", "each rank holds a summand"),
        (
            "<span class='mark whole'>R<i>&part;P</i></span>",
            "replicated; the gradient is a summand on each rank (&part;avg: of the mean)",
        ),
        ("<span class=arrow>outside &rarr; inside</span>", "a tensor that crosses a boundary"),
    ]
    axes = "".join(
        f'<span class="axis {_axis_class(plan, name)}">{escape(name)}</span>'
        for name in plan.model_axes
    )
    items = "".join(f"<li>{mark}<span>{text}</span></li>" for mark, text in rows)
    return f"<section class=legend><h2>Marks</h2><ul>{items}</ul><p>{axes}</p></section>"


def _axis_class(plan: ShardingPlan, axis: str) -> str:
    return f"a{plan.model_axes.index(axis)}" if axis in plan.model_axes else "data"


# -- the tree ------------------------------------------------------------------------------------


def _branch(plan: ShardingPlan, branch: Branch, sizes: Sizes, depth: int) -> str:
    """One module and what it holds. Chains of modules that only hold one thing are one line."""
    inner = [
        *_parameters(plan, branch),
        *(_branch(plan, child, sizes, depth + 1) for child in branch.children),
    ]
    if not branch.boundaries and len(inner) == len(branch.parameters) == 1:
        return _parameter(plan, branch.parameters[0], f"{branch.label}.")
    if not branch.boundaries:
        label = f"<span class=name>{escape(branch.label)}</span>"
        if not inner:
            return ""
        return f"<details open class=plain><summary>{label}</summary>{''.join(inner)}</details>"
    first = branch.boundaries[0].items[0]
    region = first.region
    opaque = region is not None and region.kind.value == "opaque"
    tag = f"<span class=kind>{escape(first.kind.value)}</span>"
    if opaque and region is not None:
        named = region.function.rpartition(":")[2].replace("_", " ")
        tag += f"<span class='kind opaque' title='{escape(region.reason, quote=True)}'>"
        tag += f"opaque{': ' + escape(named) if named else ''}</span>"
    held = f"<span class=quiet>{escape(first.reason)}</span>"
    label = f"<span class=name>{escape(branch.label or 'the model')}</span>{tag}{held}"
    label += _weight(first, sizes)
    entering = _edges(plan, branch, inward=True)
    leaving = _edges(plan, branch, inward=False)
    return (
        f'<details open class="box k-{escape(first.kind.value)}{" region" if opaque else ""}">'
        f"<summary>{label}</summary>{entering}<div class=inside>{''.join(inner)}</div>{leaving}"
        "</details>"
    )


def _edges(plan: ShardingPlan, branch: Branch, inward: bool) -> str:
    """The tensors on one edge of the box; those that are alike in all layers come once."""
    rows: dict[tuple[str, str], list[str]] = {}
    for variant in branch.boundaries:
        for spec in variant.items:
            for tensor in spec.inputs if inward else spec.outputs:
                row = _edge(plan, tensor, inward)
                rows.setdefault(row, []).append(spec.module)
    every = [spec.module for variant in branch.boundaries for spec in variant.items]
    lines = []
    for (label, marks), names in rows.items():
        only = "" if len(names) == len(every) else f"<span class=only>{_only(names)}</span>"
        lines.append(f"<div class=edge>{label}{only}{marks}</div>")
    side = "in" if inward else "out"
    return f'<div class="edges {side}">{"".join(lines)}</div>' if lines else ""


def _only(names: Iterable[str]) -> str:
    return escape(f"in {fold_names(names)}")


def _edge(plan: ShardingPlan, tensor: BoundaryTensor, inward: bool) -> tuple[str, str]:
    """The tensor's name, and what becomes of it."""
    name = escape(tensor.where or "result") if not tensor.where.isdecimal() else "result"
    sign = "&#9656;" if inward else "&#9666;"
    label = f"<span class=sign>{sign}</span><span class=tensor>{name}</span>"
    ends = (tensor.outside, tensor.inside)
    if tensor.plain and ends[0] == ends[1]:
        return label, "<span class=quiet>plain, whole on every rank</span>"
    marks = _marks(plan, ends[0])
    if ends[0] != ends[1]:
        source, target = ends if inward else ends[::-1]
        forward, backward = transition_words(source, target, plan.model_axes)
        marks = f"{_marks(plan, source)}<span class=arrow>&rarr;</span>{_marks(plan, target)}"
        marks += f"<span class=move>{escape(_told(forward, 'forward'))}</span>"
        if not tensor.plain:
            marks += f"<span class='move back'>{escape(_told(backward, 'backward'))}</span>"
    return label, marks


def _told(words: str, phase: str) -> str:
    return f"{phase}: nothing" if words == "-" else f"{phase}: {words}"


def _weight(spec: BoundarySpec, sizes: Sizes) -> str:
    """Bytes that the boundary sends in one layer."""
    parts = [
        f"{show_bytes(sizes[spec.module, phase])} {phase}"
        for phase in ("forward", "backward")
        if (spec.module, phase) in sizes
    ]
    return f"<span class=bytes>{', '.join(parts)}</span>" if parts else ""


def _parameters(plan: ShardingPlan, branch: Branch) -> list[str]:
    return [_parameter(plan, variant) for variant in branch.parameters]


def _parameter(plan: ShardingPlan, variant: Variant[ParameterSpec], inside: str = "") -> str:
    spec = variant.items[0]
    shape, local = spec.shape, local_shape(plan, spec)
    sizes = "&times;".join(map(str, shape)) or "scalar"
    if local != shape:
        sizes += f" <span class=local>&rarr; {'&times;'.join(map(str, local))}</span>"
    reason = escape(spec.reason, quote=True)
    only = f"<span class=only>{escape(variant.only)}</span>" if variant.only else ""
    name = escape(inside + variant.label)
    return (
        f'<div class=parameter title="{reason}"><span class=name>{name}</span>'
        f"<span class=shape>{sizes}</span>{_marks(plan, spec.contract)}"
        f"<span class=role>{escape(spec.role.replace('_', ' '))}</span>{only}</div>"
    )


def _marks(plan: ShardingPlan, contract: Contract) -> str:
    """One mark for every model axis, in mesh order, so that marks line up in columns."""
    marks = []
    for axis in plan.model_axes:
        placement, gradient = contract.placement(axis), dict(contract.grad_placements).get(axis)
        text = describe(placement)
        kind = {"R": "whole", "P": "sum"}.get(text[0], "cut")
        shown = "P" if text == "P(sum)" else text.partition(",")[0] + ")" * ("," in text)
        told = f"{axis}: {text}"
        note = ""
        if gradient is not None:
            grad = describe(gradient)
            note = f"<i>&part;{escape('P' if grad == 'P(sum)' else grad[2:-1])}</i>"
            told += f", gradient {grad}"
        marks.append(
            f'<span class="mark {kind} {_axis_class(plan, axis)}" title="{escape(told)}">'
            f"{escape(shown)}{note}</span>"
        )
    return f"<span class=marks>{''.join(marks)}</span>"
