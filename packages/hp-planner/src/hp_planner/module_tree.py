"""The plan's names as a tree in which numbered modules that are alike appear once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from attrs import define, field, frozen

from hp_dtensor.plan import BoundarySpec, ParameterSpec, ShardingPlan
from hp_planner.folding import fold_names, split_numbers

T = TypeVar("T")


@frozen
class Variant(Generic[T]):
    """Parameters or boundaries at one place of the tree that are alike but for their numbers.

    Attributes:
        label: the last segment of their name.
        only: which of the place's numbers they are, folded; empty for all of them.
    """

    label: str
    items: tuple[T, ...]
    only: str = ""


@define
class Branch:
    """One place in the tree.

    Attributes:
        label: the segment; `layers[0..47]` for numbered modules.
        boundaries: of the module at this place; parameters: its own.
    """

    label: str
    boundaries: list[Variant[BoundarySpec]] = field(factory=list)
    parameters: list[Variant[ParameterSpec]] = field(factory=list)
    children: list[Branch] = field(factory=list)


def module_tree(plan: ShardingPlan) -> Branch:
    """The tree of all boundaries and parameters, in the plan's order; the model is its root."""
    names = [spec.name.rpartition(".")[0] for spec in plan.parameters]
    modules = [*(spec.module for spec in plan.boundaries), *names]
    return _grow("", "", list(dict.fromkeys(modules)), plan)


def _grow(pattern: str, label: str, modules: list[str], plan: ShardingPlan) -> Branch:
    branch = Branch(label)
    depth = pattern.count(".") + 1 if pattern else 0
    here = {name for name in modules if split_numbers(name)[0] == pattern}
    branch.boundaries = list(
        _variants(
            [spec for spec in plan.boundaries if spec.module in here],
            lambda spec: spec.module,
            lambda spec: spec.kind,
        )
    )
    branch.parameters = list(
        _variants(
            [spec for spec in plan.parameters if spec.name.rpartition(".")[0] in here],
            lambda spec: spec.name,
            lambda spec: (spec.name.rpartition(".")[2], spec.shape, spec.contract, spec.role),
        )
    )
    for inner, label_of_it, held in _places(modules, pattern, depth):
        branch.children.append(_grow(inner, label_of_it, held, plan))
    return branch


def _places(modules: list[str], pattern: str, depth: int) -> Iterator[tuple[str, str, list[str]]]:
    """The next places below: pattern, label and the modules in each. A list and its numbered
    elements are one place."""
    below: dict[str, list[str]] = {}
    for name in modules:
        parts = split_numbers(name)[0].split(".")
        if not name or (pattern and ".".join(parts[:depth]) != pattern) or len(parts) <= depth:
            continue
        end = depth + 1
        while end < len(parts) and parts[end] == "#":
            end += 1
        below.setdefault(".".join(parts[:end]), []).append(name)
    for place, held in below.items():
        yield place, _label(place, depth, held), held


def _label(place: str, depth: int, held: list[str]) -> str:
    """`layers[0..47]`: the place's own segments, with the numbers that occur."""
    segments = place.count(".") + 1
    own = {".".join(name.split(".")[depth:segments]) for name in held}
    head, _, numbers = fold_names(sorted(own)).partition(".")
    return f"{head}[{numbers.strip('{}')}]" if numbers else head


def _variants(
    items: list[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> Iterator[Variant[T]]:
    groups: dict[tuple[str, Hashable], list[T]] = {}
    for item in items:
        groups.setdefault((name(item).rpartition(".")[2], key(item)), []).append(item)
    for (label, _), members in groups.items():
        alike = [each for each in items if name(each).rpartition(".")[2] == label]
        everywhere = len(alike) == len(members)
        only = "" if everywhere else f"in {fold_names(name(each) for each in members)}"
        yield Variant(label, tuple(members), only)
