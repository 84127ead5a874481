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

from hp_muon.errors import MuonError
from hp_muon.normuon import normalise_rows
from hp_muon.relay import Hop, Relay, gather
from hp_muon.rules import MomentumRule, Scale, apply_updates, update_scale
from hp_muon.step_plan import Batch, Member, Part, StepPlan
from hp_platform import Origin, aligned_empty


@frozen
class Hyperparameters:
    """One parameter group's live settings."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    scale: Scale


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
        row_moments: NorMuon's, by kind, of the matrices this rank is compute owner of; filled here.
        hyperparameters: of each parameter.
        orthogonalize: (matrices [n, rows, cols], batch, out) -> writes the same shape to out.
        momentum_rule: see `rules.MomentumRule`.
        trials: momenta of members without a gradient, as they become if others have one.
        findings: for some matrices each, who they belong to and whether they are finite.
    """

    locals: Mapping[int, Tensor]
    gradients: Mapping[int, Tensor | None]
    momenta: Mapping[int, Tensor]
    row_moments: Mapping[int, dict[int, Tensor]]
    hyperparameters: Mapping[int, Hyperparameters]
    channels: Sequence[Channel]
    workspace: Workspace
    orthogonalize: Callable[[Tensor, Batch, Tensor], None]
    momentum_rule: MomentumRule
    check_finite: bool
    trials: dict[tuple[int, int], Tensor] = field(factory=dict)
    findings: list[tuple[Part, frozenset[int], Tensor]] = field(factory=list)


@define(eq=False)
class InFlight:
    """A batch whose updates are on their way."""

    batch: Batch
    channel: Channel
    stepped: frozenset[int]
    updates: Tensor
    relay: Relay
    finite: Tensor = field(factory=lambda: torch.ones(0, dtype=torch.bool))


def muon_step(plan: StepPlan, run: StepRun) -> None:
    """Steps every Muon parameter of this rank.

    For every batch: the replica owner updates the momentum, one fused gather per sharding axis
    brings the shards together, compute owners run the batched Newton-Schulz, a packed relay
    broadcast returns the updates, every rank slices and applies its own, and the replica owner
    broadcasts the result. One relay and one replica broadcast are in flight while the next batch
    is computed; the drain waits for the last of both.

    Raises:
        MuonError: the input of a matrix was not finite; on every rank that shares the matrix, after
            all exchanges.
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
    report_findings(run)


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
    staging = run.workspace.take(
        "staging", batch.staging_numel, batch.orthogonalization.dtype, batch.device
    )
    start = sum(segment.total for segment in part.segments[:shard])
    own = staging[start : start + layout.total]
    flags, *places = layout.views(own, _staged_shapes(part, shard))
    flags.fill_(1)
    for group, members in _by_hyperparameters(part, run).items():
        present = [m for m in members if run.gradients[part.members[m].index] is not None]
        for m in set(members) - set(present):
            flags[m] = 0
            places[m].copy_(_try_without_gradient(part.members[m], group, run))
        if not present:
            continue
        chosen = [part.members[m] for m in present]
        momenta = [m.geometry.selection.of(run.momenta[m.index]) for m in chosen]
        gradients = [
            m.geometry.selection.of(gradient)
            for m in chosen
            if (gradient := run.gradients[m.index]) is not None
        ]
        inputs = run.momentum_rule(momenta, gradients, group.momentum, group.nesterov)
        for member, momentum in zip(chosen, momenta):
            member.geometry.selection.write_back(run.momenta[member.index], momentum)
        targets = [places[m].view(value.shape) for m, value in zip(present, inputs)]
        torch._foreach_copy_(targets, inputs)
    return staging


def _try_without_gradient(member: Member, group: Hyperparameters, run: StepRun) -> Tensor:
    """The input if the gradient is zero here; what the momentum becomes then is kept aside."""
    momentum = member.geometry.selection.of(run.momenta[member.index]).clone()
    zero = torch.zeros_like(momentum)
    (value,) = run.momentum_rule([momentum], [zero], group.momentum, group.nesterov)
    run.trials[member.key] = momentum
    return value.reshape(member.geometry.pieces[member.geometry.own].shape)


def gather_shards(batch: Batch, channel: Channel, staging: Tensor) -> list[list[Tensor]]:
    """Per shard coordinate: its presence flags, then its members' shards."""
    part = batch.own
    if part.members:
        gather(staging, channel.gather, _origin(batch, "gather"))
    pieces = []
    start = 0
    for shard, segment in enumerate(part.segments):
        chunk = staging[start : start + segment.total]
        pieces.append(segment.views(chunk, _staged_shapes(part, shard)))
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
                member = part.members[m]
                selection, momentum = member.geometry.selection, run.momenta[member.index]
                place = selection.of(momentum)
                place.copy_(run.trials[member.key])
                selection.write_back(momentum, place)
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
    chunk = _chunk(batch, updates, owner)
    # Unless a matrix is left out, the results lie in the chunk as the inputs do.
    results = chunk if count == chunk.shape[0] else torch.empty_like(matrices)
    run.orthogonalize(matrices, batch, results)
    beta2 = batch.orthogonalization.normuon_beta2
    at = 0
    for o in mine:
        update = results[at : at + o.hi - o.lo]
        if beta2 is not None:
            normalise_rows(update, _row_moments(batch, run, o.member, update), beta2)
        if results is not chunk:
            chunk[o.at : o.at + o.hi - o.lo] = update
        at += o.hi - o.lo
    return updates


def _row_moments(batch: Batch, run: StepRun, position: int, update: Tensor) -> Tensor:
    member = batch.own.members[position]
    moments = run.row_moments[member.index]
    if member.kind not in moments:
        moments[member.kind] = update.new_zeros(update.shape[:2], dtype=torch.float32)
    return moments[member.kind]


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
    # An update that is not finite anywhere is so everywhere; matrices may have no element.
    flight.finite = torch.cat([chunk[:, :1, :1].sum((1, 2)) for chunk in chunks]).isfinite()
    run.findings.append((part, flight.stepped, flight.finite))
    for group, members in _by_hyperparameters(part, run).items():
        stepped = sorted(set(members) & flight.stepped)
        pairs: list[tuple[Tensor, Tensor]] = []
        copies: list[tuple[Member, Tensor]] = []
        for m in stepped:
            member = part.members[m]
            local = member.geometry.selection.of(run.locals[member.index])
            pairs += own_updates(batch, part, m, local, chunks)
            copies.append((member, local))
        scale = update_scale(group.scale, batch.rows, batch.cols)
        targets, updates = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        apply_updates(targets, updates, group.lr, group.weight_decay, scale)
        for member, local in copies:
            member.geometry.selection.write_back(run.locals[member.index], local)


def own_updates(
    batch: Batch, part: Part, position: int, local: Tensor, chunks: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of equal shape: a piece of the member's part of the local tensor, and its update."""
    member = part.members[position]
    geometry = member.geometry
    piece = geometry.pieces[batch.domain.shard_rank]
    if piece.numel == 0:
        return []
    overlaps = part.overlaps_of[position]
    pieces = [(o, chunks[o.owner][o.at : o.at + o.hi - o.lo]) for o in overlaps]
    stack = _as_stack(local, geometry.count, piece.shape) if geometry.is_direct else None
    if stack is not None:
        return [(stack[o.lo : o.hi], update[piece.plane]) for o, update in pieces]
    matrices = torch.cat([update for _, update in pieces])
    whole = geometry.view.restore(matrices).reshape(geometry.flat_shape)
    return [(local, whole[piece.block].reshape(local.shape))]


def _as_stack(local: Tensor, count: int, shape: Sequence[int]) -> Tensor | None:
    """`local` as [count, rows, cols] that shares its storage; None if its strides allow none."""
    if local.shape != tuple(shape):
        return None
    if local.ndim == 2:
        return local.unsqueeze(0)
    if local.ndim == 3:
        return local
    return local.view(count, *shape[-2:]) if local.is_contiguous() else None


def publish_to_replicas(flight: InFlight, run: StepRun) -> Relay:
    """Packs the updated local tensors of this rank's part and sends all parts to all replicas."""
    batch, part = flight.batch, flight.batch.own
    total = sum(part.publication.total for part in batch.parts)
    buffer = run.workspace.take("publication", total, batch.dtype, batch.device)
    rank = batch.domain.replica_rank
    flags, locals = _publication(batch, buffer, run, rank)
    if part.count:
        flags.copy_(flight.finite)
        for m in set(range(len(part.members))) - flight.stepped:
            member = part.members[m]
            flags[member.first : member.first + member.count] = 1
    if locals:
        places = [view.view(local.shape) for _, local, view in locals]
        torch._foreach_copy_(places, [local for _, local, _ in locals])
    return Relay(buffer, flight.channel.publish, _origin(batch, "publish"))


def receive_from_owners(batch: Batch, buffer: Tensor, run: StepRun) -> None:
    """Copies what the other replica owners published into the local tensors."""
    for replica, part in enumerate(batch.parts):
        if replica == batch.domain.replica_rank or not part.members:
            continue
        flags, locals = _publication(batch, buffer, run, replica)
        run.findings.append((part, frozenset(range(len(part.members))), flags != 0))
        if locals:
            places = [view.view(local.shape) for _, local, view in locals]
            torch._foreach_copy_([local for _, local, _ in locals], places)
        for member, local, _ in locals:
            member.geometry.selection.write_back(run.locals[member.index], local)


def _publication(
    batch: Batch, buffer: Tensor, run: StepRun, replica: int
) -> tuple[Tensor, list[tuple[Member, Tensor, Tensor]]]:
    """A replica owner's flags, and its members with their local tensors and places in `buffer`."""
    start = sum(part.publication.total for part in batch.parts[:replica])
    part = batch.parts[replica]
    segment = buffer[start : start + part.publication.total]
    shapes = [m.geometry.pieces[batch.domain.shard_rank].shape for m in part.members]
    flags, *views = part.publication.views(segment, [(part.count,), *shapes])
    locals = [m.geometry.selection.of(run.locals[m.index]) for m in part.members]
    found = [
        (member, local, view)
        for member, local, view in zip(part.members, locals, views)
        if local.numel()
    ]
    return flags, found


def report_findings(run: StepRun) -> None:
    """Raises for matrices that were not finite; the only place where the host waits for them.

    Raises:
        MuonError: names the parameters.
    """
    if not run.check_finite or not run.findings:
        return
    if bool(torch.cat([finite for *_, finite in run.findings]).all()):
        return
    names = [
        member.name
        for part, stepped, finite in run.findings
        for position, member in enumerate(part.members)
        if position in stepped
        and not bool(finite[member.first : member.first + member.count].all())
    ]
    if names:
        raise MuonError(
            f"the gradient, momentum or update of {len(names)} parameters was not finite: "
            f"{sorted(set(names))[:10]}. Their weights and momentum are lost: go back to a "
            "checkpoint, and look for the cause with torch.nn.utils.clip_grad_norm_(..., "
            "error_if_nonfinite=True) or a GradScaler, which act before the step"
        )


def _chunk(batch: Batch, updates: Tensor, owner: int) -> Tensor:
    """[n, rows, cols]: the packed updates of one compute owner."""
    part = batch.own
    count = part.bounds[owner + 1] - part.bounds[owner]
    start = sum(part.chunks[:owner])
    numel = count * batch.rows * batch.cols
    return updates[start : start + numel].view(count, batch.rows, batch.cols)


def _staged_shapes(part: Part, shard: int) -> list[tuple[int, ...]]:
    shapes = [member.geometry.pieces[shard].shape for member in part.members]
    return [(len(part.members),), *shapes]


def _by_hyperparameters(part: Part, run: StepRun) -> dict[Hyperparameters, list[int]]:
    groups: dict[Hyperparameters, list[int]] = {}
    for position, member in enumerate(part.members):
        groups.setdefault(run.hyperparameters[member.index], []).append(position)
    return groups


def _origin(batch: Batch, what: str) -> Origin:
    return Origin("hp_muon", f"{what} {batch.rows}x{batch.cols}", "optimizer")
