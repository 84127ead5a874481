"""A unit: the modules whose parameters one `fully_shard` call handles together.

The unit gathers its parameters before they are needed and releases them afterwards, one
all-gather per bucket (paper section 5.1). When to do so is decided in `hooks`, how gradients
are reduced in `backward`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn

from hp_fsdp.bucket import Bucket
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.full_buffer import FullBuffer
from hp_fsdp.gradient_buffer import GradientBuffer, GradientSlots
from hp_fsdp.offload import Offload
from hp_fsdp.pages import PagePool
from hp_fsdp.param import ShardedParameter
from hp_fsdp.policies import CommPolicy, MixedPrecisionPolicy
from hp_platform import Origin
from hp_platform.links import Link

if TYPE_CHECKING:
    from hp_fsdp.hooks import Call
    from hp_fsdp.root import Root

PACKAGE = "hp_fsdp"
UNUSED_ADVICE = (
    "a unit that some ranks leave out needs set_reduce_scatter_unused_params(True) on all of them"
)
_NAMED = 6
"""How many parameters a message names."""


class UnitState(enum.Enum):
    """What the unit's modules have registered."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    """All-gathers are in flight; the shards are still registered."""
    GATHERED = "gathered"
    """The full parameters are registered and valid."""


class Unit:
    """Parameters of `modules` that no earlier `fully_shard` call took.

    Attributes:
        modules: the modules given to `fully_shard`.
        buckets: parameters that travel together; collectives are issued in this order on every
            rank.
        parameters: those of all buckets, in registration order.
        trainable: those whose gathered form requires a gradient, as of the last gather; in order.
        comm: which parameters travel together, and `link`, what was measured to decide it.
        offload: copies to and from the host, where shards live there and the mesh does not.
        path: qualified module name below the root; shown in errors and in the ledger.
        number: its place among the units of the shard axis's group.
        is_below: a module that contains this one is sharded too.
        root: shared state of the model; set at the first forward.
        is_compared: the ranks that gather it know that they gather the same.
        reshard_after_forward: True, False, or None for "True unless backward begins with this".
        reshard_after_backward: whether backward releases the gathered parameters.
        requires_gradient_sync: False accumulates gradients without any communication.
        requires_all_reduce: False accumulates on the shards, without the slow tier.
        divisor: what the sum of the gradients over the data-parallel ranks is divided by.
        shows_shards: the modules have the shards registered although the unit is gathered.
        in_backward: between the first use of the parameters in a backward and their release.
        backward_pass: number of the pass in which `in_backward` began.
        call: the forward call in progress.
        calls_ahead: forward calls that no backward has reached.
        calls_within: forward calls whose outputs backward has reached and whose inputs it has not.
        fired: trainable parameters whose gradient this backward has completed.
        reduced: the gradients that this backward completed have been taken.
        unshard_in_backward: False where backward does not read the parameters' values.
        reduces_unused: ranks may differ in whether they use the unit; it is gathered with the
            root's forward and reduced when backward ends, on all of them.
        has_new_buffers: buffers have left the meta device and have not been looked at.
        all_reduce_hook: gets every flat sum of shards before it is divided.
        partial_sums: per element type, reduce-scattered gradients of micro-steps that have not
            been reduced over the replicas.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        buckets: Sequence[Bucket],
        parameters: Sequence[ShardedParameter],
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        comm: CommPolicy,
        link: Link | None,
        offload: Offload | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.buckets = tuple(buckets)
        self.parameters = tuple(parameters)
        self.trainable = self._trainable()
        self.data = data
        self.policy = policy
        self.comm = comm
        self.link = link
        self.offload = offload
        self.path = type(modules[0]).__name__
        trail = data.shard.trail
        self.number = trail.next_number() if trail is not None else 0
        self.is_below = False
        self.root: Root | None = None
        self.is_compared = False
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divisor: float = data.data_parallel_size
        self.state = UnitState.SHARDED
        self.shows_shards = False
        self.in_backward = False
        self.backward_pass = -1
        self.call: Call | None = None
        self.calls_ahead: WeakSet[Call] = WeakSet()
        self.calls_within: set[Call] = set()
        self.fired: set[ShardedParameter] = set()
        self.reduced = False
        self.modules_running: set[nn.Module] = set()
        self.partial_sums: dict[torch.dtype, torch.Tensor] = {}
        self.unshard_in_backward = True
        self.reduces_unused = False
        self.has_new_buffers = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self._origins: dict[tuple[str, str], Origin] = {}
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None

    def __repr__(self) -> str:
        return f"<Unit {self.path!r}, {len(self.parameters)} parameters, {self.state.value}>"

    # -- gathering ---------------------------------------------------------------------------

    def gather(self, phase: str) -> None:
        """Issues the all-gathers unless they are done or in flight; see `wait`."""
        if self.state is not UnitState.SHARDED:
            return
        if phase == "backward" and not self.unshard_in_backward:
            return
        if not self.is_compared:
            assert self.root is not None
            self.root.models.before_gather(self)
        origin = self.origin(phase)
        with torch.no_grad():
            pages, changed = self.pages, False
            for bucket in self.buckets:
                changed |= bucket.begin_gather(pages, origin)
        if changed:
            self.trainable = self._trainable()
        self.state = UnitState.GATHERING

    def origin(self, phase: str) -> Origin:
        """What this unit's collectives are asked by; made once for every phase and name."""
        key = (phase, self.path)
        known = self._origins.get(key)
        if known is None:
            names = [repr(parameter.name) for parameter in self.parameters]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            # Several models, or parts of one that is not sharded as a whole, have the same name.
            kind = f"unit {self.number}, " if self.path == "root" else ""
            detail = f"{kind}parameters {', '.join(names[:_NAMED])}{more}"
            known = Origin(PACKAGE, self.path, phase, detail, UNUSED_ADVICE)
            self._origins[key] = known
        return known

    def wait(self) -> None:
        """Makes the full parameters valid and registers them, if they are gathered at all."""
        if self.shows_shards:
            self.shows_shards = False
            for bucket in self.buckets:
                bucket.register_full()
        if self.state is not UnitState.GATHERING:
            return
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.finish_gather()
        self.state = UnitState.GATHERED

    def show_shards(self) -> None:
        """Registers the shards and keeps what is gathered: until `wait`, gradients are found."""
        if self.state is UnitState.GATHERED and not self.shows_shards:
            for bucket in self.buckets:
                bucket.register_shards()
            self.shows_shards = True

    def release(self) -> None:
        """Registers the shards again and gives the gathered memory back."""
        self.wait()
        if self.state is UnitState.GATHERED:
            pages = self.pages
            for bucket in self.buckets:
                bucket.release(pages)
            self.state = UnitState.SHARDED
        self.in_backward = False

    def retire(self) -> None:
        """As `release`, and keeps what backward gathers from, if that is more than the shards."""
        self.wait()
        if self.state is UnitState.GATHERED:
            for bucket in self.buckets:
                bucket.keep_part()
        self.release()

    def drop_if_stale(self) -> None:
        """Releases gathered values that shards have left behind, e.g. after an optimizer step."""
        if self.shows_shards and any(p.is_replaced for p in self.parameters):
            self.shows_shards = False
            self.state = UnitState.SHARDED
        # What is still on its way may have been gathered ahead in a pass that has failed.
        if self.state is not UnitState.SHARDED and any(b.is_stale for b in self.buckets):
            self.release()

    @property
    def pages(self) -> PagePool:
        """Where the model's units leave memory for one another."""
        assert self.root is not None
        return self.root.pages

    @property
    def waits_on_host(self) -> bool:
        """Whether waiting for a collective holds nothing but the thread that waits."""
        return self.data.shard.device.type == "cpu"

    def take_back(self) -> None:
        """Returns when no peer reads the shards any more: they may be written from now on."""
        for bucket in self.buckets:
            bucket.take_back()

    @property
    def is_root(self) -> bool:
        return self.root is not None and self.root.unit is self

    @property
    def releases_after_forward(self) -> bool:
        if self.reduces_unused:
            return False
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    # -- gradients ---------------------------------------------------------------------------

    def on_gradient(self, callback: Callable[[Unit, ShardedParameter], None]) -> None:
        for bucket in self.buckets:
            bucket.on_gradient(partial(callback, self))

    def make_room(self) -> None:
        """Backward enters the unit: gives autograd the place for gradients."""
        with torch.no_grad():
            pages = self.pages
            for bucket in self.buckets:
                bucket.make_room(pages)

    def _trainable(self) -> tuple[ShardedParameter, ...]:
        return tuple(p for p in self.parameters if p.sharded.requires_grad)

    @property
    def has_frozen(self) -> bool:
        """Some parameter's gathered form requires no gradient."""
        return len(self.trainable) < len(self.parameters)

    @property
    def has_gradients(self) -> bool:
        return any(b.has_gradients for b in self.buckets)

    @property
    def needs_reduction(self) -> bool:
        """Something is left to reduce: autograd's gradients, or sums kept from micro-steps."""
        if not self.requires_gradient_sync:
            return False
        if self.reduces_unused and self.trainable:
            return True
        return self.has_gradients or (bool(self.partial_sums) and self.requires_all_reduce)

    def slots(self, buckets: Sequence[Bucket], dtype: torch.dtype) -> GradientSlots:
        """Places in the gradient buffer for the reduced parts of `buckets`; remembered."""
        key = (tuple(buckets), dtype)
        if key not in self._slots:
            self._slots[key] = GradientSlots.of([bucket.part for bucket in buckets], dtype)
        return self._slots[key]

    @cached_property
    def _slots(self) -> dict[tuple[tuple[Bucket, ...], torch.dtype], GradientSlots]:
        return {}

    def hold_received(self, data: torch.Tensor) -> FullBuffer | None:
        """Memory for the other replica's `data`, where backends need it; None if it is in use.

        Whoever holds it releases it.
        """
        replicate = self.data.replicate
        if replicate is None or replicate.size != 2 or data.device.type != "cpu":
            return None
        key = (data.numel(), data.dtype)
        memory = self._received.get(key)
        if memory is None:
            memory = self._received[key] = FullBuffer(data.numel(), data.dtype, data.device)
        if memory.is_held:
            return None
        memory.hold(self.pages)
        return memory

    @cached_property
    def _received(self) -> dict[tuple[int, torch.dtype], FullBuffer]:
        return {}

    def add_partial_sum(self, buffer: GradientBuffer) -> None:
        """Keeps a reduce-scattered buffer for a later micro-step's all-reduce."""
        held = self.partial_sums.get(buffer.data.dtype)
        if held is None:
            self.partial_sums[buffer.data.dtype] = buffer.data
        else:
            held.add_(buffer.data)
