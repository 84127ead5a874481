"""Saving and loading: from the state that this rank holds to the canonical one, and back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hp_muon.adamw import new_adamw_state
from hp_muon.channels import Channels
from hp_muon.errors import MuonError
from hp_muon.grouping import Geometry
from hp_muon.slots import Slot
from hp_muon.state import (
    from_owner,
    local_tensor,
    replicated_like,
    sum_over,
    to_local_state,
    with_layout_of,
)
from hp_muon.step_plan import Batch, Member, StepPlan

MOMENTUM = "momentum_buffer"
ROWS = "second_moment_buffer"
"""NorMuon's second moments: in memory by kind of matrices, outside one vector a parameter."""

State = Mapping[Tensor, Mapping[str, Any]]


@frozen(eq=False)
class Archive:
    """Canonical state of the parameters of one plan.

    Attributes:
        slots: the optimizer's parameters.
        state: what this rank holds.
    """

    plan: StepPlan
    channels: Channels
    slots: Sequence[Slot]
    state: State

    def canonical(self) -> defaultdict[Tensor, Any]:
        """Every tensor with its parameter's layout. Collective where momentum is shared."""
        momenta = self.momenta()
        rows = self.rows()
        canonical: defaultdict[Tensor, Any] = defaultdict(dict)
        for slot in self.slots:
            held = dict(self.state.get(slot.parameter, {}))
            if slot.on_muon:
                held = {MOMENTUM: momenta[slot.index]}
            elif "step" not in held:
                held = dict(new_adamw_state(slot.local))
            layout = slot.layout
            canonical[slot.parameter] = {
                key: with_layout_of(slot.parameter, layout, value)
                if isinstance(value, Tensor) and key != "step"
                else value
                for key, value in held.items()
            }
            if slot.index in rows:
                value = replicated_like(slot.parameter, layout, rows[slot.index])
                canonical[slot.parameter][ROWS] = value
        return canonical

    def momenta(self) -> dict[int, Tensor]:
        """Local momentum of every Muon parameter, from its replica owner where shared."""
        momenta: dict[int, Tensor] = {}
        for batch, replica, member in self._members():
            if member.index in momenta:
                continue
            slot = self.slots[member.index]
            held = self.state.get(slot.parameter, {}).get(MOMENTUM)
            axes = self.channels.replica_axes(batch.domain)
            owner = _coordinates(replica, batch.domain.replica_sizes)
            momenta[member.index] = from_owner(held, slot.local, owner, axes, member.name)
        return momenta

    def rows(self) -> dict[int, Tensor]:
        """NorMuon's second moments of every matrix's rows, [matrices x rows of all kinds].

        Each compute owner has its own; all are summed over the ranks that share a parameter.
        """
        found: dict[int, Tensor] = {}
        reduced: dict[int, Batch] = {}
        places = self._places()
        for batch, replica, member in self._members():
            if batch.orthogonalization.normuon_beta2 is None:
                continue
            slot = self.slots[member.index]
            if member.index not in found:
                found[member.index] = torch.zeros(
                    places[member.index][-1], dtype=torch.float32, device=slot.local.device
                )
                reduced[member.index] = batch
            held = self.state.get(slot.parameter, {}).get(ROWS, {}).get(member.kind)
            if held is None or replica != batch.domain.replica_rank:
                continue
            target = _of_kind(found[member.index], places[member.index], member)
            target[_owned_numbers(batch, member).to(target.device)] = held
        for index, batch in reduced.items():
            layout = self.slots[index].layout
            sharding = () if layout is None else tuple(layout.sharding_axes())
            axes = self.channels.sharing_axes(batch.domain, sharding)
            sum_over(found[index], axes, self.slots[index].name)
        return found

    def keep(self, momenta: Mapping[int, Tensor], rows: Mapping[int, Tensor]) -> None:
        """Puts canonical local values back as what this rank holds under the plan."""
        places = self._places()
        for slot in self.slots:
            if not slot.on_muon:
                continue
            held: Any = self.state[slot.parameter]
            held.pop(ROWS, None)
            if slot.index not in self.plan.owned:
                held.pop(MOMENTUM, None)
            elif slot.index in momenta:
                held[MOMENTUM] = momenta[slot.index]
        for batch, replica, member in self._members():
            if member.index not in rows or replica != batch.domain.replica_rank:
                continue
            numbers = _owned_numbers(batch, member)
            if batch.orthogonalization.normuon_beta2 is not None and len(numbers):
                value = _of_kind(rows[member.index], places[member.index], member)
                kinds = self.state[self.slots[member.index].parameter]
                kinds = kinds.setdefault(ROWS, {})  # type: ignore[attr-defined]
                kinds[member.kind] = value[numbers.to(value.device)].clone()

    def _members(self) -> list[tuple[Batch, int, Member]]:
        return [
            (batch, replica, member)
            for batch in self.plan.batches
            for replica, part in enumerate(batch.parts)
            for member in part.members
        ]

    def _places(self) -> dict[int, tuple[int, ...]]:
        """Per parameter, where the vector of each kind of matrices begins, and the whole length."""
        kinds: dict[int, dict[int, Geometry]] = defaultdict(dict)
        for _, _, member in self._members():
            kinds[member.index][member.kind] = member.geometry
        return {
            index: tuple(
                accumulate(
                    (found[k].origin.count * found[k].origin.rows for k in sorted(found)),
                    initial=0,
                )
            )
            for index, found in kinds.items()
        }


def _of_kind(vector: Tensor, places: Sequence[int], member: Member) -> Tensor:
    """[matrices, rows] of one kind, sharing storage."""
    part = vector[places[member.kind] : places[member.kind + 1]]
    return part.view(-1, member.geometry.origin.rows)


def _owned_numbers(batch: Batch, member: Member) -> Tensor:
    """Numbers, among all of the parameter's, of the matrices this rank is compute owner of."""
    part, rank = batch.own, batch.domain.shard_rank
    position = next((p for p, m in enumerate(part.members) if m.key == member.key), None)
    if position is None:
        return torch.empty(0, dtype=torch.int64)
    numbers = member.geometry.numbers
    owned = [numbers[o.lo : o.hi] for o in part.overlaps_of[position] if o.owner == rank]
    return torch.cat(owned) if owned else numbers[:0]


def match(saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Any]) -> dict[Tensor, Any]:
    """The saved id of every parameter: by name where both sides know names, else by order.

    Raises:
        MuonError: numbers or names of parameters differ.
    """
    found = [len(group["params"]) for group in saved_groups]
    expected = [len(group["params"]) for group in groups]
    if found != expected:
        raise MuonError(
            f"loaded state has groups of {found} parameters, this optimizer has {expected}"
        )
    matched: dict[Tensor, Any] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, groups)):
        ids = list(saved["params"])
        if saved.get("param_names") and group.get("param_names"):
            by_name = dict(zip(saved["param_names"], ids))
            missing = [name for name in group["param_names"] if name not in by_name]
            if missing:
                raise MuonError(
                    f"loaded state, group {number}: no state for parameters {missing}; it "
                    f"has {list(by_name)[:5]} and others"
                )
            ids = [by_name[name] for name in group["param_names"]]
        matched.update(zip(group["params"], ids))
    return matched


def localise(saved: Mapping[str, Any], slot: Slot) -> dict[str, Any]:
    """A parameter's loaded state as local tensors, copied; NorMuon's vector whole.

    Raises:
        MuonError: it is another algorithm's, or has another layout or shape.
    """
    layout, local, name = slot.layout, slot.local, slot.name
    state: dict[str, Any] = {}
    needed = MOMENTUM if slot.on_muon else "exp_avg"
    if saved and needed not in saved:
        raise MuonError(
            f"state of parameter {name!r}: loaded {sorted(saved)} without {needed!r}, which "
            f"{'Muon' if slot.on_muon else 'AdamW'} steps with; load the state of the "
            "same algorithm, or leave this parameter's state out to begin anew"
        )
    for key, value in saved.items():
        if not isinstance(value, Tensor):
            state[key] = value
        elif key == "step":
            state[key] = value.detach().clone()
        elif key == ROWS:
            state[key] = local_tensor(value.detach()).to(local.device, torch.float32, copy=True)
        else:
            found = to_local_state(value.detach(), slot.parameter, layout, name)
            dtype = torch.float32 if slot.on_muon else local.dtype
            state[key] = found.to(device=local.device, dtype=dtype, copy=True)
    return state


def check_rows(rows: Mapping[int, Tensor], archive: Archive) -> None:
    """Refuses NorMuon state of another number of rows.

    Raises:
        MuonError: names the parameter.
    """
    places = archive._places()
    for index, value in rows.items():
        if value.shape != (places[index][-1],):
            raise MuonError(
                f"state of parameter {archive.slots[index].name!r}: loaded {ROWS} of shape "
                f"{tuple(value.shape)}, expected {places[index][-1]} rows of all its matrices; "
                "its view was another one"
            )


def _coordinates(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major position as coordinates."""
    return tuple(
        index // math.prod(sizes[position + 1 :]) % size for position, size in enumerate(sizes)
    )
