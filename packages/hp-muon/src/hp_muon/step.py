"""One Muon step, replayed from its plan: the sentence of the paper's section 6, in its order.

The elementwise rules are in `rules`, the iteration in `newton_schulz`, the plan in `step_plan`,
the exchanges in `relay`. Nothing here decides anything but which parameters have a gradient.

Gradients that are None. Every rank replays the whole plan whatever gradients it has, so ranks
with different gradients cannot wait for one another. Each member has a presence flag in its
segment of the staging buffer. A rank that has the gradient steps the parameter; a rank that has
not reads the flags of its shard group: none set, and the parameter is skipped by all; some set,
and its own shard counts as zero. Replicas follow their replica owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from hp_muon.relay import Hop, Relay, gather
from hp_muon.rules import accumulate, apply_updates, update_scale
from hp_muon.step_plan import Batch, Member, Part, StepPlan
from hp_platform import Origin, aligned_empty


@frozen
class Hyperparameters:
    """One parameter group's live settings."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    scale: str


@frozen(eq=False)
class Channel:
    """The exchanges of one batch, compiled for this rank.

    Attributes:
        gather: of the staging buffer's segments along the sharding axes.
        relay: of the compute owners' updates along the sharding axes.
        publish: of updated local tensors along the replica axes.
    """

    gather: tuple[Hop, ...]
    relay: tuple[Hop, ...]
    publish: tuple[Hop, ...]


@define(eq=False)
class Workspace:
    """Aligned buffers kept between steps, each as large as its largest use.

    Two update buffers alternate: the relay of a batch is in flight while the next batch writes
    its own. The publication buffer is reused only after the publication before has landed.
    """

    _buffers: dict[tuple[object, ...], Tensor] = field(factory=dict)

    def take(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (role, dtype, device)
        found = self._buffers.get(key)
        if found is None or found.numel() < numel:
            found = self._buffers[key] = aligned_empty(numel, dtype, device)
        return found[:numel]


@define(eq=False)
class StepRun:
    """One step's tensors, by parameter index, and what it needs to run.

    Attributes:
        locals: local tensors, updated in place.
        gradients: local gradients, None where there is none.
        momenta: float32 momentum of the parameters this rank owns.
        hyperparameters: of each parameter.
        orthogonalize: [n, rows, cols] -> the same shape.
    """

    locals: Mapping[int, Tensor]
    gradients: Mapping[int, Tensor | None]
    momenta: Mapping[int, Tensor]
    hyperparameters: Mapping[int, Hyperparameters]
    channels: Sequence[Channel]
    workspace: Workspace
    orthogonalize: Callable[[Tensor, Batch], Tensor]


@define(eq=False)
class InFlight:
    """A batch whose updates are on their way."""

    batch: Batch
    channel: Channel
    stepped: frozenset[int]
    updates: Tensor
    relay: Relay


def muon_step(plan: StepPlan, run: StepRun) -> None:
    """Steps every Muon parameter of this rank.

    For every batch: the replica owner updates the momentum, one fused gather per sharding axis
    brings the shards together, compute owners run the batched Newton-Schulz, a packed relay
    broadcast returns the updates, every rank slices and applies its own, and the replica owner
    broadcasts the result. One relay and one replica broadcast are in flight while the next batch
    is computed; the drain waits for the last of both.
    """
    pipeline = Pipeline(run)
    for position, batch in enumerate(plan.batches):
        staging = update_momentum(batch, run)
        shards = gather_shards(batch, run.channels[position], staging)
        pipeline.advance()
        stepped = agree_on_gradients(batch, run, shards)
        updates = orthogonalize_owned(batch, run, shards, stepped, slot=position % 2)
        pipeline.admit(batch, run.channels[position], stepped, updates)
    pipeline.drain()


class Pipeline:
    """At most one relay and one replica broadcast in flight; admitting a batch settles the last."""

    def __init__(self, run: StepRun) -> None:
        self._run = run
        self._relayed: InFlight | None = None
        self._published: tuple[Batch, Relay] | None = None

    def advance(self) -> None:
        """Moves what is in flight on to its next axis, if it has one."""
        if self._published is not None:
            self._published[1].advance()
        if self._relayed is not None:
            self._relayed.relay.advance()

    def admit(
        self, batch: Batch, channel: Channel, stepped: frozenset[int], updates: Tensor
    ) -> None:
        self._settle()
        relay = Relay(updates, channel.relay, _origin(batch, "relay"))
        self._relayed = InFlight(batch, channel, stepped, updates, relay)

    def drain(self) -> None:
        self._settle()
        self._land()

    def _settle(self) -> None:
        if self._relayed is None:
            return
        flight, self._relayed = self._relayed, None
        flight.relay.wait()
        slice_and_apply(flight, self._run)
        self._land()
        if flight.batch.domain.replica_size > 1:
            relay = publish_to_replicas(flight, self._run)
            self._published = (flight.batch, relay)

    def _land(self) -> None:
        if self._published is not None:
            batch, relay = self._published
            self._published = None
            receive_from_owners(batch, relay.wait(), self._run)


def update_momentum(batch: Batch, run: StepRun) -> Tensor:
    """Momentum of the parameters this rank owns; their Newton-Schulz inputs, packed for the gather.

    A missing gradient counts as zero in the packed input but does not touch the momentum yet:
    whether the parameter is stepped at all is known only after the gather.
    """
    part, shard = batch.own, batch.domain.shard_rank
    layout = part.segments[shard]
    total = sum(segment.total for segment in part.segments)
    staging = run.workspace.take("staging", total, batch.orthogonalization.dtype, batch.device)
    start = sum(segment.total for segment in part.segments[:shard])
    own = staging[start : start + layout.total]
    shapes = [(len(part.members),), *(m.geometry.pieces[shard].shape for m in part.members)]
    flags, *places = layout.views(own, shapes)
    flags.fill_(1)
    for group, members in _by_hyperparameters(part, run).items():
        present = [m for m in members if run.gradients[part.members[m].index] is not None]
        indices = [part.members[m].index for m in present]
        inputs = accumulate(
            [run.momenta[i] for i in indices],
            [g for i in indices if (g := run.gradients[i]) is not None],
            group.momentum,
            group.nesterov,
        )
        if inputs:
            torch._foreach_copy_([places[m] for m in present], inputs)
        for m in sorted(set(members) - set(present)):
            flags[m] = 0
            decay = group.momentum**2 if group.nesterov else group.momentum
            places[m].copy_(run.momenta[part.members[m].index]).mul_(decay)
    return staging


def gather_shards(batch: Batch, channel: Channel, staging: Tensor) -> list[list[Tensor]]:
    """Per shard coordinate: its presence flags, then its members' shards."""
    part = batch.own
    if part.members:
        gather(staging, channel.gather, _origin(batch, "gather"))
    pieces = []
    start = 0
    for shard, segment in enumerate(part.segments):
        shapes = [(len(part.members),), *(m.geometry.pieces[shard].shape for m in part.members)]
        pieces.append(segment.views(staging[start : start + segment.total], shapes))
        start += segment.total
    return pieces


def agree_on_gradients(
    batch: Batch, run: StepRun, shards: Sequence[Sequence[Tensor]]
) -> frozenset[int]:
    """Positions of the members that are stepped, alike on every rank of the shard group.

    Only a rank that misses a gradient reads flags back from the device.
    """
    part = batch.own
    missing = [m for m, member in enumerate(part.members) if run.gradients[member.index] is None]
    stepped = set(range(len(part.members))) - set(missing)
    if missing:
        anywhere = torch.stack([pieces[0] for pieces in shards]).amax(dim=0).tolist()
        for m in missing:
            if anywhere[m] > 0:
                index = part.members[m].index
                run.momenta[index].mul_(run.hyperparameters[index].momentum)
                stepped.add(m)
    return frozenset(stepped)


def orthogonalize_owned(
    batch: Batch,
    run: StepRun,
    shards: Sequence[Sequence[Tensor]],
    stepped: frozenset[int],
    slot: int,
) -> Tensor:
    """Newton-Schulz of the matrices this rank is compute owner of, packed for the relay."""
    part, owner, dtype = batch.own, batch.domain.shard_rank, batch.orthogonalization.dtype
    updates = run.workspace.take(f"updates{slot}", sum(part.chunks), dtype, batch.device)
    mine = [o for o in part.overlaps if o.owner == owner and o.member in stepped]
    count = sum(o.hi - o.lo for o in mine)
    if count == 0:
        return updates
    matrices = torch.empty(count, batch.rows, batch.cols, dtype=dtype, device=batch.device)
    at = 0
    for o in mine:
        target = matrices[at : at + o.hi - o.lo]
        assemble(part.members[o.member], [pieces[1 + o.member] for pieces in shards], o.lo, target)
        at += o.hi - o.lo
    results = run.orthogonalize(matrices, batch)
    chunk = _chunk(batch, updates, owner)
    at = 0
    for o in mine:
        chunk[o.at : o.at + o.hi - o.lo] = results[at : at + o.hi - o.lo]
        at += o.hi - o.lo
    return updates


def assemble(member: Member, shards: Sequence[Tensor], lo: int, target: Tensor) -> None:
    """Writes a member's matrices from `lo` on into `target` [n, rows, cols]."""
    geometry = member.geometry
    pieces = list(zip(geometry.pieces, shards))
    if geometry.is_direct:
        for piece, shard in pieces:
            if piece.numel:
                block = shard.reshape(geometry.count, *piece.shape[-2:])
                target[piece.plane] = block[lo : lo + target.shape[0]]
        return
    whole = target.new_empty(geometry.flat_shape)
    for piece, shard in pieces:
        if piece.numel:
            whole[piece.block] = shard
    stack = geometry.view.matrices(whole.view(geometry.view.shape))
    target.copy_(stack[lo : lo + target.shape[0]])


def slice_and_apply(flight: InFlight, run: StepRun) -> None:
    """Each rank takes its own rows and cols of every update and applies them."""
    batch, part = flight.batch, flight.batch.own
    chunks = [_chunk(batch, flight.updates, s) for s in range(batch.domain.shard_size)]
    for group, members in _by_hyperparameters(part, run).items():
        stepped = set(members) & flight.stepped
        targets: list[Tensor] = []
        updates: list[Tensor] = []
        for m in sorted(stepped):
            for target, update in own_updates(batch, part, m, run.locals, chunks):
                targets.append(target)
                updates.append(update)
        scale = update_scale(group.scale, batch.rows, batch.cols)
        apply_updates(targets, updates, group.lr, group.weight_decay, scale)


def own_updates(
    batch: Batch, part: Part, position: int, locals: Mapping[int, Tensor], chunks: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of equal shape: a piece of the member's local tensor, and its update."""
    member = part.members[position]
    geometry = member.geometry
    piece = geometry.pieces[batch.domain.shard_rank]
    local = locals[member.index]
    if piece.numel == 0:
        return []
    overlaps = part.overlaps_of[position]
    pieces = [(o, chunks[o.owner][o.at : o.at + o.hi - o.lo]) for o in overlaps]
    if geometry.is_direct and local.is_contiguous():
        stack = local.view(geometry.count, *piece.shape[-2:])
        return [(stack[o.lo : o.hi], update[piece.plane]) for o, update in pieces]
    matrices = torch.cat([update for _, update in pieces])
    whole = geometry.view.restore(matrices).reshape(geometry.flat_shape)
    return [(local, whole[piece.block])]


def publish_to_replicas(flight: InFlight, run: StepRun) -> Relay:
    """Packs the updated local tensors of this rank's part and sends all parts to all replicas."""
    batch = flight.batch
    total = sum(part.publication.total for part in batch.parts)
    buffer = run.workspace.take("publication", total, batch.dtype, batch.device)
    rank = batch.domain.replica_rank
    views = _publication_views(batch, buffer, run.locals, rank)
    if views:
        torch._foreach_copy_([view for _, view in views], [local for local, _ in views])
    return Relay(buffer, flight.channel.publish, _origin(batch, "publish"))


def receive_from_owners(batch: Batch, buffer: Tensor, run: StepRun) -> None:
    """Copies what the other replica owners published into the local tensors."""
    for replica in range(len(batch.parts)):
        views = _publication_views(batch, buffer, run.locals, replica)
        if replica != batch.domain.replica_rank and views:
            torch._foreach_copy_([local for local, _ in views], [view for _, view in views])


def _publication_views(
    batch: Batch, buffer: Tensor, locals: Mapping[int, Tensor], replica: int
) -> list[tuple[Tensor, Tensor]]:
    start = sum(part.publication.total for part in batch.parts[:replica])
    part = batch.parts[replica]
    segment = buffer[start : start + part.publication.total]
    tensors = [locals[member.index] for member in part.members]
    views = part.publication.views(segment, [tensor.shape for tensor in tensors])
    return [(tensor, view) for tensor, view in zip(tensors, views) if tensor.numel()]


def _chunk(batch: Batch, updates: Tensor, owner: int) -> Tensor:
    """[n, rows, cols]: the packed updates of one compute owner."""
    part = batch.own
    count = part.bounds[owner + 1] - part.bounds[owner]
    start = sum(part.chunks[:owner])
    numel = count * batch.rows * batch.cols
    return updates[start : start + numel].view(count, batch.rows, batch.cols)


def _by_hyperparameters(part: Part, run: StepRun) -> dict[Hyperparameters, list[int]]:
    groups: dict[Hyperparameters, list[int]] = {}
    for position, member in enumerate(part.members):
        groups.setdefault(run.hyperparameters[member.index], []).append(position)
    return groups


def _origin(batch: Batch, what: str) -> Origin:
    return Origin("hp_muon", f"{what} {batch.rows}x{batch.cols}", "optimizer")
