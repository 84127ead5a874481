"""Stops all ranks, before a parameter is communicated, where their models differ.

Collectives match by order and size alone: ranks that differ in a shape, a type or a unit hand one
another memory that means something else, and some backends end the process. So the ranks of each
group compare a digest of what they will send there, once a model: those that gather together
before their first gather, and all groups in the first forward that may lead to a backward. A
forward without gradients asks no more ranks than its gathers do: one replica may run it alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hp_fsdp.bucket import Bucket
from hp_fsdp.param import ShardedParameter
from hp_fsdp.unit import PACKAGE, Unit
from hp_platform import (
    ALIGNMENT,
    AgreementError,
    MeshAxis,
    Origin,
    aligned_empty,
    all_gather,
    gather_objects,
)

if TYPE_CHECKING:
    from hp_fsdp.root import Root

_ORIGIN = Origin(
    PACKAGE,
    "models",
    "agreement",
    detail="compared at first, and again after the types of parameters have changed",
)
_SHOWN, _NAMED = 400, 3
"""Characters of what a rank has, and parameters that travel with one, that a message tells."""

Item = tuple[str, str]
"""Path of a unit, and what of it: a parameter, a setting, or "" for the unit itself."""
Description = dict[Item, str]
Types = list[list[torch.dtype]]


class ModelAgreement:
    """What the ranks of a model's groups know about one another's model; one for every root.

    Attributes:
        is_complete: all groups have compared everything.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        # With the types that the parameters had then.
        self._compared: dict[dist.ProcessGroup | None, Types] = {}
        self.is_complete = False
        for unit in root.units:
            unit.is_compared = False

    def before_gather(self, unit: Unit) -> None:
        """The ranks that gather `unit` compare what they have on its shard axis.

        Raises:
            AgreementError: they differ; on all of them.
        """
        self._compare([unit.data.shard])

    def before_training(self) -> None:
        """All ranks that train this model together compare it.

        Raises:
            AgreementError: they differ; on all ranks of the root's mesh.
        """
        self._compare(self._axes())
        self.is_complete = True

    def look_again(self) -> None:
        """Types of parameters may have changed: they are looked at before the next gather."""
        self.is_complete = False
        for unit in self._root.units:
            unit.is_compared = False

    def _axes(self) -> list[MeshAxis]:
        """One of every group, in an order in which no two groups wait for each other.

        The root's come last: their ranks are then told what smaller groups have found.
        """
        last = {_group(axis): axis for axis in _axes_of(self._root.unit)}
        known = {_group(axis): axis for unit in self._root.units for axis in _axes_of(unit)}
        others = [axis for group, axis in known.items() if group not in last]
        return [*sorted(others, key=_place), *last.values()]

    def _compare(self, axes: Sequence[MeshAxis]) -> None:
        problem = ""
        # Nothing is compared where nothing is sent: on fake and simulated groups, too.
        types = {_group(axis): self._types_on(axis) for axis in axes if axis.trail is not None}
        for axis in axes:
            # A rank that has changed types and changed them back makes no call of its own.
            if _group(axis) in types and types[_group(axis)] != self._compared.get(_group(axis)):
                problem = self._compare_on(axis, problem)
        if problem:
            raise AgreementError(problem)
        self._compared.update(types)
        settled = set(map(_group, axes))
        for unit in self._root.units:
            unit.is_compared |= _group(unit.data.shard) in settled

    def _types_on(self, axis: MeshAxis) -> Types:
        return [types_of(unit) for unit in self._units_on(axis)]

    def _units_on(self, axis: MeshAxis) -> list[Unit]:
        return [unit for unit in self._root.units if _group(axis) in map(_group, _axes_of(unit))]

    def _compare_on(self, axis: MeshAxis, problem: str) -> str:
        """What one of the ranks on the axis has found, or they find together; "" for nothing."""
        own = _described(self._units_on(axis), self._root)
        digest = hashlib.sha256(json.dumps(list(own.items())).encode()).digest()
        # Of one length, whatever the models: ranks that differ must be able to exchange it.
        words = [*digest, bool(problem)]
        sent = aligned_empty(ALIGNMENT, torch.uint8, axis.device).zero_()
        sent[: len(words)] = torch.tensor(words, dtype=torch.uint8)
        room = aligned_empty(axis.size * ALIGNMENT, torch.uint8, axis.device)
        found = all_gather(sent, axis, output=room, origin=_ORIGIN).wait().view(axis.size, -1)
        if found[:, : len(words)].tolist().count([*digest, 0]) == axis.size:
            return ""
        answers = gather_objects((problem, own), axis, origin=_ORIGIN)
        known = next((earlier for earlier, _ in answers if earlier), "")
        return known or _difference(axis, [description for _, description in answers])


def _group(axis: MeshAxis) -> dist.ProcessGroup | None:
    return axis.process_group


def _axes_of(unit: Unit) -> list[MeshAxis]:
    axes = (unit.data.shard, unit.data.replicate)
    return [axis for axis in axes if axis is not None and axis.trail is not None]


def _place(axis: MeshAxis) -> tuple[int, tuple[int, ...], str]:
    """By which all ranks of any group sort it alike."""
    assert axis.process_group is not None
    return axis.size, axis.ranks, axis.process_group.group_name


# -- what is compared -----------------------------------------------------------------------------


def _described(units: Sequence[Unit], root: Root) -> Description:
    """Everything about the units on which the collectives of a step, and their sums, depend."""
    items: Description = {}
    for unit in units:
        items[unit.path, ""] = "a unit"
        depths = root.forward_order.depth, root.backward_order.depth
        for name, value in {**_settings(unit), "set_prefetch_depth": depths}.items():
            items[unit.path, name] = str(value)
        for bucket in unit.buckets:
            for parameter in bucket.parameters:
                items[unit.path, f"parameter {parameter.name!r}"] = _account(parameter, bucket)
    return items


def _settings(unit: Unit) -> dict[str, object]:
    near = next((bucket.near for bucket in unit.buckets), None)
    replicas = unit.data.replicate.size if unit.data.replicate is not None else 1
    return {
        "mesh": f"axes {unit.data.axis_names} of {replicas} x {unit.data.shard.size} ranks",
        "mp_policy": unit.policy,
        "comm_policy": unit.comm.choice,
        "reshard_after_forward": unit.reshard_after_forward if near is None else near.size,
        "set_reshard_after_backward": unit.reshard_after_backward,
        "set_unshard_in_backward": unit.unshard_in_backward,
        "set_reduce_scatter_unused_params": unit.reduces_unused,
        "set_gradient_divide_factor": unit.divisor,
        "set_modules_to_forward_prefetch": _paths(unit.forward_prefetch),
        "set_modules_to_backward_prefetch": _paths(unit.backward_prefetch),
    }


def _paths(units: Sequence[Unit] | None) -> list[str] | None:
    return None if units is None else [unit.path for unit in units]


def types_of(unit: Unit) -> list[torch.dtype]:
    """Those of the shards that the modules hold."""
    return [_registered(parameter).dtype for parameter in unit.parameters]


def _registered(parameter: ShardedParameter) -> torch.Tensor:
    """What the modules hold, as after `module.to`: the next gather takes it over."""
    owner = parameter.owners[0]
    registered = owner.module._parameters[owner.name]
    if registered is None or registered is parameter.shown:
        return parameter.sharded
    return registered


def _account(parameter: ShardedParameter, bucket: Bucket) -> str:
    registered = _registered(parameter)
    others = [repr(other.name) for other in bucket.parameters if other is not parameter]
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    company = f"with {', '.join(others[:_NAMED])}{more}" if others else "alone"
    trains = "trainable" if registered.requires_grad else "frozen"
    layout = parameter.partial_layout or parameter.layout
    return f"{registered.dtype}, {trains}, {layout}, travels {company}"


# -- what is said ---------------------------------------------------------------------------------


def _difference(axis: MeshAxis, descriptions: Sequence[Description]) -> str:
    """The first difference; every rank on the axis gives the same answer."""
    items = dict.fromkeys(item for description in descriptions for item in description)
    # What some ranks do not have at all explains other differences.
    lacking = [item for item in items if any(item not in each for each in descriptions)]
    unlike = [item for item in items if len({each.get(item) for each in descriptions}) > 1]
    if unlike:
        first = (lacking or unlike)[0]
        place = _named(first)
        found = [_told(each, first) for each in descriptions]
    else:
        orders = [list(each) for each in descriptions]
        number = next(n for n, each in enumerate(zip(*orders)) if len(set(each)) > 1)
        place = "the first place in another order"
        found = [_named(order[number]) for order in orders]
    more = f" ({len(unlike)} items differ in all)" if len(unlike) > 1 else ""
    return (
        f"ranks on mesh axis {axis.name!r} have different models under fully_shard. At "
        f"{place}: {_by_rank(axis, found)}{more}. Build the same model on every rank, and "
        "give fully_shard the same modules, in the same order, with the same arguments; call the "
        "same one first"
    )


def _named(item: Item) -> str:
    unit, what = item
    return f"unit {unit!r}{what and ', '}{what}"


def _told(description: Mapping[Item, str], item: Item) -> str:
    unit, what = item
    if item in description:
        return description[item][:_SHOWN] if what else "such a unit"
    return "no such unit" if (unit, "") not in description else "none"


def _by_rank(axis: MeshAxis, found: Sequence[str]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, text in zip(axis.ranks, found):
        alike.setdefault(text, []).append(rank)
    # Most ranks first; among equals the lowest rank.
    listed = sorted(alike.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    return "; ".join(
        f"rank {ranks[0]} has {text}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))} have {text}"
        for text, ranks in listed
    )
