"""What two plans do differently, name by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from hp_dtensor.placements import describe
from hp_dtensor.plan import BoundarySpec, BoundaryTensor, Contract, ParameterSpec, ShardingPlan
from hp_planner.folding import fold

ABSENT = "(absent)"


@frozen
class Change:
    """One property of one thing that differs.

    Attributes:
        subject: "plan", "parameter" or "boundary"; name: qualified name, empty for the plan.
        what: the property: "placement", "role", "input hidden_states", "region", ...
        before, after: as text; `(absent)` where only one plan has it.
    """

    subject: str
    name: str
    what: str
    before: str
    after: str


@frozen
class PlanDiff:
    """Every change from one plan to another; false where there is none.

    Attributes:
        before, after: digests.
    """

    before: str
    after: str
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return f"the plans are equal ({self.before})"
        groups = fold(
            self.changes, lambda c: c.name, lambda c: (c.subject, c.what, c.before, c.after)
        )
        count = "1 change" if len(self.changes) == 1 else f"{len(self.changes)} changes"
        lines = [f"plan {self.before} -> {self.after}: {count}"]
        for name, (first, *_) in groups:
            where = f" {name or '(model)'}" if first.subject != "plan" else ""
            lines.append(f"  {first.subject}{where}: {first.what}")
            lines.append(f"    - {first.before}")
            lines.append(f"    + {first.after}")
        return "\n".join(lines)


def diff(before: ShardingPlan, after: ShardingPlan) -> PlanDiff:
    """The changes that lead from one plan to another.

    Equal plans have no change, and plans without a change are equal: reasons count.
    """
    found = (*_plan(before, after), *_parameters(before, after), *_boundaries(before, after))
    return PlanDiff(before.digest, after.digest, found)


def _plan(before: ShardingPlan, after: ShardingPlan) -> Iterator[Change]:
    yield from _differing(
        "plan",
        "",
        {"model": before.model, "mesh": str(before.mesh), "model axes": _list(before.model_axes)}
        | {"tied parameters": _list(map(_list, before.tied))},
        {"model": after.model, "mesh": str(after.mesh), "model axes": _list(after.model_axes)}
        | {"tied parameters": _list(map(_list, after.tied))},
    )
    for subject, one, other in (
        ("parameter", _names(before.parameters), _names(after.parameters)),
        ("boundary", _modules(before.boundaries), _modules(after.boundaries)),
    ):
        common = [name for name in one if name in set(other)]
        if common != [name for name in other if name in set(one)]:
            yield Change("plan", "", f"order of the {subject} list", "as before", "another")


def _names(specs: Iterable[ParameterSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _modules(specs: Iterable[BoundarySpec]) -> list[str]:
    return [spec.module for spec in specs]


def _list(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"


def _parameters(before: ShardingPlan, after: ShardingPlan) -> Iterator[Change]:
    old = {spec.name: _of_parameter(spec) for spec in before.parameters}
    new = {spec.name: _of_parameter(spec) for spec in after.parameters}
    yield from _paired("parameter", old, new)


def _boundaries(before: ShardingPlan, after: ShardingPlan) -> Iterator[Change]:
    old = {spec.module: _of_boundary(spec) for spec in before.boundaries}
    new = {spec.module: _of_boundary(spec) for spec in after.boundaries}
    yield from _paired("boundary", old, new)


def _paired(
    subject: str, old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> Iterator[Change]:
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new:
            held = old.get(name) or new.get(name) or {}
            told = "; ".join(f"{what} {value}" for what, value in held.items() if what != "why")
            ends = (told, ABSENT) if name in old else (ABSENT, told)
            yield Change(subject, name, "removed" if name in old else "added", *ends)
        else:
            yield from _differing(subject, name, old[name], new[name])


def _differing(
    subject: str, name: str, old: Mapping[str, str], new: Mapping[str, str]
) -> Iterator[Change]:
    for what in dict.fromkeys((*old, *new)):
        one, other = old.get(what, ABSENT), new.get(what, ABSENT)
        if one != other:
            yield Change(subject, name, what, one, other)


def _of_parameter(spec: ParameterSpec) -> dict[str, str]:
    return {
        "placement": show(spec.contract),
        "role": spec.role,
        "shape": " x ".join(map(str, spec.shape)) or "()",
        "boundary": spec.boundary or "(model)",
        "why": spec.reason,
    }


def _of_boundary(spec: BoundarySpec) -> dict[str, str]:
    found = {"kind": spec.kind.value}
    for direction, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        for tensor in tensors:
            found[f"{direction} {tensor.where}".strip()] = _of_tensor(tensor)
    for attribute in spec.localize:
        found[f"attribute {attribute.name} over {attribute.axis}"] = str(attribute.value)
    if spec.region is not None:
        called = f", {spec.region.function}" if spec.region.function else ""
        found["region"] = f"{spec.region.kind.value}{called} ({spec.region.reason})"
    found["why"] = spec.reason
    return found


def _of_tensor(tensor: BoundaryTensor) -> str:
    marks = [name for name in ("plain", "optional") if getattr(tensor, name)]
    like = getattr(tensor, "like", "")
    marks += [f"like {like}"] if like else []
    noted = f" ({', '.join(marks)})" if marks else ""
    return f"outside {show(tensor.outside)}, inside {show(tensor.inside)}{noted}"


def show(contract: Contract) -> str:
    """A contract in one line: `tp: S(0)`, `tp: R grad P(sum)`, or `R`."""
    parts = {axis: describe(placement) for axis, placement in contract.placements}
    for axis, gradient in contract.grad_placements:
        parts[axis] = f"R grad {describe(gradient)}"
    return ", ".join(f"{axis}: {text}" for axis, text in sorted(parts.items())) or "R"
