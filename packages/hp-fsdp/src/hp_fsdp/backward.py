"""Gradient reduction: four steps after each unit's backward, and one settlement (section 5.3).

A unit's reduce-scatter is due one unit later, its all-reduce over the replicas only at the end of
backward. So the fast tier goes first and is waited for one unit later; the slow tier is issued
behind it and waited for in the settlement only. Where a wait holds nothing but the calling thread,
as on the CPU, the beginning of the next unit is late enough: the slow tier, which the end of
backward waits for, starts as much earlier. Elsewhere a wait holds the computation that follows it.

Gradients are summed on both tiers and divided once, by `Unit.divisor`, after the last sum and
before anything else reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import define
from torch import Tensor

from hp_dtensor.settlement import settle_gradients
from hp_fsdp.bucket import Bucket
from hp_fsdp.full_buffer import FullBuffer
from hp_fsdp.gradient_buffer import GradientBuffer
from hp_fsdp.offload import HostCopy
from hp_fsdp.pages import PagePool
from hp_fsdp.param import ShardedParameter
from hp_fsdp.scatter import Scatter
from hp_fsdp.unit import PACKAGE, Unit
from hp_platform import Handle, Origin, all_reduce, mark
from hp_platform.division import divide_

SETTLEMENT_BEGINS = "hp_fsdp settlement begins"
SETTLEMENT_ENDS = "hp_fsdp settlement ends"


@define(eq=False)
class FusedGradients:
    """Gradients of one unit and one element type on their way through both tiers."""

    buckets: tuple[Bucket, ...]
    buffer: GradientBuffer
    scatters: list[Scatter]
    earlier: Tensor | None = None
    """Sums of earlier micro-steps that join the all-reduce."""
    all_reduce: Handle[Tensor] | None = None
    is_divided: bool = False
    """Its last collective divides the sum."""
    received: FullBuffer | None = None
    """Memory that the all-reduce uses meanwhile."""
    leaving: HostCopy | None = None
    """The copy to the host, where shards live there."""

    def wait_fast(self) -> None:
        """Waits for the shard axis."""
        for scatter in self.scatters:
            scatter.wait()

    def free(self, pages: PagePool) -> None:
        """After `wait_fast`, as soon as no rank reads the full gradients: frees their memory."""
        for scatter in self.scatters:
            scatter.close(pages)
        self.scatters.clear()

    def gradients(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Every trainable parameter with its place in the buffer, in the shape of its shard."""
        for bucket, part in zip(self.buckets, self.buffer.views):
            for parameter in bucket.parameters:
                if parameter.sharded.requires_grad:
                    final = parameter.partial_layout is None
                    here = self._on_host(part) if final else part
                    yield parameter, bucket.local_gradient(parameter, here)

    def _on_host(self, part: Tensor) -> Tensor:
        """`part` of the buffer where the shards are."""
        if self.leaving is None:
            return part
        start = part.storage_offset() - self.buffer.data.storage_offset()
        return self.leaving.wait()[start : start + part.numel()]


@define(eq=False)
class Reduction:
    """One unit's gradient reduction in flight."""

    unit: Unit
    fused: list[FusedGradients]
    to_replicas: bool
    """Whether the unit has replicas to agree with."""
    completes: bool
    """Whether this micro-step goes over the slow tier, or is kept on the shards."""
    is_ahead: bool = False
    """Backward has entered the next unit, and the slow tier is on its way."""

    @classmethod
    def issue(cls, unit: Unit) -> Reduction:
        """Issues the reduce-scatters of every bucket that trains, each into its view.

        A parameter that this backward did not use contributes zero, so that ranks which used
        different parameters of the unit still issue the same collectives.
        """
        origin = unit.origin("backward")
        to_replicas = unit.data.has_replicas
        # A hook on the sums gets them before they are divided.
        is_last_sum = not to_replicas and unit.all_reduce_hook is None
        by_dtype: dict[torch.dtype, list[Bucket]] = {}
        for bucket in unit.buckets:
            if bucket.has_trainable:
                by_dtype.setdefault(bucket.reduce_dtype, []).append(bucket)
        fused = []
        with torch.no_grad():
            for dtype, buckets in by_dtype.items():
                buffer = unit.slots(buckets, dtype).allocate(unit.data.shard.device)
                pages = unit.pages
                is_divided = is_last_sum and all(bucket.divides for bucket in buckets)
                divisor = unit.divisor if is_divided else 1
                scatters = [
                    bucket.scatter(view, pages, divisor, origin)
                    for bucket, view in zip(buckets, buffer.views)
                ]
                # Taken now, so that nothing else finds them and reduces them a second time.
                earlier = unit.partial_sums.pop(dtype, None) if unit.requires_all_reduce else None
                one = FusedGradients(tuple(buckets), buffer, scatters, earlier)
                one.is_divided = is_divided
                fused.append(one)
        return cls(unit, fused, to_replicas, unit.requires_all_reduce)

    def wait_fast(self) -> None:
        """As `FusedGradients.wait_fast`, for all element types."""
        with torch.no_grad():
            for fused in self.fused:
                fused.wait_fast()

    def free(self) -> None:
        """As `FusedGradients.free`."""
        for fused in self.fused:
            fused.free(self.unit.pages)

    def issue_slow(self) -> None:
        """Issues one all-reduce per buffer, earlier micro-steps included."""
        assert self.unit.data.replicate is not None
        origin = self.unit.origin("backward")
        for fused in self.fused:
            if fused.earlier is not None:
                fused.buffer.data.add_(fused.earlier)
                fused.earlier = None
            data = fused.buffer.data
            fused.received = self.unit.hold_received(data)
            scratch = None if fused.received is None else fused.received.data
            # A hook on the sums gets them before they are divided.
            fused.is_divided = self.unit.all_reduce_hook is None
            divisor = self.unit.divisor if fused.is_divided else 1
            fused.all_reduce = all_reduce(
                data, self.unit.data.replicate, divisor=divisor, scratch=scratch, origin=origin
            )

    @property
    def all_reduces(self) -> bool:
        """Whether the slow tier is on its way."""
        return any(fused.all_reduce is not None for fused in self.fused)

    def keep_for_later(self) -> None:
        """Micro-steps without the slow tier: sums stay on the shards."""
        for fused in self.fused:
            self.unit.add_partial_sum(fused.buffer)

    def finish(self) -> None:
        """Waits for the slow tier and divides; the buffers then hold final gradients."""
        for fused in self.fused:
            if fused.all_reduce is not None:
                fused.all_reduce.wait()
            if fused.received is not None:
                fused.received.release(self.unit.pages)
                fused.received = None
            if self.unit.all_reduce_hook is not None:
                self.unit.all_reduce_hook(fused.buffer.data)
            if not fused.is_divided:
                divide_(fused.buffer.data, self.unit.divisor)
            if self.unit.offload is not None:
                fused.leaving = self.unit.offload.to_host(fused.buffer.data)


class BackwardPipeline:
    """Reductions in flight during one backward.

    At most one unit's reduce-scatters are in flight, and with them at most one unit's full
    gradients are alive besides those that autograd is computing.
    """

    def __init__(self) -> None:
        self._reducing: Reduction | None = None
        self._pending: list[Reduction] = []
        # Complete, and on their way to the host.
        self._leaving: list[Reduction] = []
        # Gradients that are summed over the data axes but not over the model axes.
        self._summands: list[tuple[ShardedParameter, Tensor]] = []

    def after_unit(self, unit: Unit) -> None:
        """Algorithm 1: what happens when a unit's backward is done."""
        previous, self._reducing = self._reducing, None
        if previous is not None:
            if not previous.is_ahead:
                previous.wait_fast()
                self._settle_without_replicas(previous)
            previous.free()
        self._reducing = Reduction.issue(unit)
        if previous is not None and not previous.is_ahead:
            self._issue_all_reduce(previous)

    def go_ahead(self) -> None:
        """Backward has entered the next unit: what is due at its end is done now.

        Only where waiting holds no more than this thread.
        """
        previous = self._reducing
        if previous is None or previous.is_ahead or not previous.unit.waits_on_host:
            return
        previous.is_ahead = True
        previous.wait_fast()
        self._settle_without_replicas(previous)
        self._issue_all_reduce(previous)

    def settle(self) -> None:
        """Waits for everything and writes all final gradients; the only wait on the slow tier."""
        mark(SETTLEMENT_BEGINS)
        with torch.no_grad():
            self._flush()
            pending, self._pending = self._pending, []
            for reduction in pending:
                self._complete(reduction)
            leaving, self._leaving = self._leaving, []
            for reduction in leaving:
                self._write(reduction)
            summands, self._summands = self._summands, []
            _settle_over_model_axes(summands)
            for parameter, gradient in summands:
                parameter.write_gradient(gradient)
        mark(SETTLEMENT_ENDS)

    def discard(self) -> None:
        """Waits for what a failed backward left in flight and forgets it."""
        leftovers = [*self._pending, *([self._reducing] if self._reducing else [])]
        self._reducing, self._pending, self._summands, self._leaving = None, [], [], []
        for reduction in dict.fromkeys(leftovers):
            reduction.wait_fast()
            reduction.free()
            # Others hold gradients that the program has, or wait for nothing.
            if reduction.all_reduces:
                reduction.finish()

    def _flush(self) -> None:
        previous, self._reducing = self._reducing, None
        if previous is None:
            return
        if not previous.is_ahead:
            previous.wait_fast()
            self._settle_without_replicas(previous)
            self._issue_all_reduce(previous)
        previous.free()

    def _settle_without_replicas(self, reduction: Reduction) -> None:
        if not reduction.to_replicas:
            with torch.no_grad():
                self._complete(reduction)

    def _complete(self, reduction: Reduction) -> None:
        """Hands out the gradients, unless they are still to arrive on the host."""
        reduction.finish()
        if reduction.unit.offload is None:
            self._write(reduction)
        else:
            self._leaving.append(reduction)

    def _issue_all_reduce(self, reduction: Reduction) -> None:
        if not reduction.to_replicas:
            return
        if reduction.completes:
            reduction.issue_slow()
            self._pending.append(reduction)
        else:
            reduction.keep_for_later()

    def _write(self, reduction: Reduction) -> None:
        """Hands out gradients that are final; others wait for the settlement."""
        for fused in reduction.fused:
            for parameter, gradient in fused.gradients():
                if parameter.partial_layout is None:
                    parameter.write_gradient(gradient)
                else:
                    self._summands.append((parameter, gradient))


def _settle_over_model_axes(summands: list[tuple[ShardedParameter, Tensor]]) -> None:
    """Sums, fused and on shards, the gradients of which each model-axis rank holds a summand."""
    if not summands:
        return
    layouts = [parameter.partial_layout for parameter, _ in summands]
    settle_gradients(
        [gradient for _, gradient in summands],
        [layout for layout in layouts if layout is not None],
        origin=Origin(PACKAGE, "model axes", "settlement"),
    )
