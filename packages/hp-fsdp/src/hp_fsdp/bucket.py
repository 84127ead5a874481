"""Parameters of a unit that travel together: one all-gather, one reduce-scatter, no copies.

A rank's part of the bucket is the all-gather's input, and the output is the buffer of which the
full parameters are views (paper section 5.1). Where the gradients' memory can be chosen, autograd
accumulates them into views of one aligned buffer, which the reduce-scatter reads as it is: shared
buffers, chunks with padding, and the CPU, whose allocator does not align to 512 bytes. Elsewhere
it is read where autograd left it, and so it is where peers read it (`PiecewiseBucket`). Only
parameters that are cut along a dim that is not leading (`PackedBucket`) are copied on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from hp_fsdp.cut import AnyCut, Cut, SharedCut
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError
from hp_fsdp.full_buffer import FullBuffer
from hp_fsdp.gathering import Gathering
from hp_fsdp.offload import HOST, Offload
from hp_fsdp.pages import PagePool
from hp_fsdp.param import ShardedParameter
from hp_fsdp.policies import MixedPrecisionPolicy
from hp_fsdp.scatter import Scatter
from hp_fsdp.schedule import Journey
from hp_fsdp.unit_memory import Memory, UnitMemory
from hp_platform import Handle, MeshAxis, Origin, reduce_scatter
from hp_platform.buffers import aligned_empty
from hp_platform.repeatable import repeatable_reduce_scatter

_Scattering = Callable[[Tensor, Origin], Handle[Tensor]]


class Bucket:
    """Parameters that travel together, laid end to end as the cuts of their journey say.

    Attributes:
        parameters: one that travels alone, or several.
        part: elements of one rank's part.
        compute_dtype: type of the gathered parameters and of the all-gather.
        reduce_dtype: type in which gradients are reduced, and accumulated until then.
        near: for a gather in backward, the ranks that hold the parameters between them since
            forward; None for all ranks of the shard axis.
        divides: whether a reduce-scatter divides its sum, at less cost than afterwards.
        storage: this rank's part, `[part]`, of which the shards are views; padding is zero.
        has_gradients: autograd has left something that has not been reduced.
    """

    divides = False

    def __init__(
        self,
        journey: Journey,
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        memory: UnitMemory,
        offload: Offload | None = None,
    ) -> None:
        self.part = journey.part
        self._data = data
        self._offload = offload
        self.near: MeshAxis | None = None
        self._part_kept: Tensor | None = None
        self._policy = policy
        self.parameters = tuple(
            ShardedParameter(candidate, cut, data)
            for candidate, cut in zip(journey.candidates, journey.cuts)
        )
        first = journey.candidates[0].parameter
        self.compute_dtype = policy.computes_in(first.dtype)
        self.reduce_dtype = policy.reduces_in(first.dtype)
        self.has_gradients = False
        self.has_trainable = False
        self._accumulated: Tensor | None = None
        self._buffer: Memory = memory.gathered.reserve(self._full_numel, self.compute_dtype)
        self._landing: Memory | None = None
        self._free_landings: list[Memory] = []
        self._given: set[int] = set()  # ids of those whose gradient has a place
        self._lands = self._chooses_place(journey.cuts[0])
        if self._lands:
            place = memory.gradients.reserve(self.gathered_numel, self.compute_dtype)
            self._free_landings.append(place)
        self._known_places: WeakKeyDictionary[Memory, list[Tensor]] = WeakKeyDictionary()
        self._known_scatters: WeakKeyDictionary[Memory, tuple[Tensor | None, _Scattering]]
        self._known_scatters = WeakKeyDictionary()
        self._scratch: Memory | None = None
        if data.shard.device.type == "cpu" and data.shard.size > 1 and self.part:
            self._scratch = memory.scratch.reserve(self._scratch_numel, self.reduce_dtype)
        self._on_gradient: Callable[[ShardedParameter], None] | None = None
        self._gathering = Gathering()
        device = torch.device("meta") if first.is_meta else self._home
        self._addresses: tuple[int, ...] = ()
        self.storage = self._make_storage(first.dtype, device)
        for parameter in self.parameters:
            parameter.take_original(self._shard_view(parameter, self.storage))

    # -- the shards --------------------------------------------------------------------------

    def _make_storage(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._offload is not None and device.type != "meta":
            storage = self._offload.empty(self._storage_numel, dtype)
        else:
            storage = aligned_empty(self._storage_numel, dtype, device)
        if device.type != "meta":
            storage.zero_()
        self._addresses = tuple(
            self._shard_view(parameter, storage).data_ptr() for parameter in self.parameters
        )
        return storage

    @property
    def _home(self) -> torch.device:
        """Where the shards are."""
        return self._data.shard.device if self._offload is None else HOST

    @property
    def _storage_numel(self) -> int:
        return self.part

    def _shard_view(self, parameter: ShardedParameter, storage: Tensor) -> Tensor:
        """The parameter's place in a part, in its local shape."""
        cut = parameter.cut
        start = cut.local_start if isinstance(cut, SharedCut) else 0
        return storage[start : start + cut.local_numel].view(cut.local_shape)

    def adopt(self) -> None:
        """Takes over whatever the modules hold now.

        Shards whose memory has been replaced are moved back into the storage, and a change of
        their type, as after `module.to(dtype)`, reaches everything made from them.

        Raises:
            ShardingError: shards that share a buffer have different types.
        """
        shards = [parameter.adopt() for parameter in self.parameters]
        dtype = shards[0].dtype
        if self.storage.dtype != dtype or self.storage.device.type != self._home.type:
            self._check_types(shards)
            self.storage = self._make_storage(dtype, self._home)
            self._change_type(dtype)
        for parameter, shard, address in zip(self.parameters, shards, self._addresses):
            if shard.numel() and shard.data_ptr() != address:
                self._check_types(shards)
                parameter.move(self._shard_view(parameter, self.storage))

    def _check_types(self, shards: list[Tensor]) -> None:
        for parameter, shard in zip(self.parameters, shards):
            if shard.dtype != shards[0].dtype:
                raise ShardingError(
                    f"parameters {self.parameters[0].name!r} ({shards[0].dtype}) and "
                    f"{parameter.name!r} ({shard.dtype}) share a buffer and must keep one type; "
                    "change the type of both, or shard with comm_policy='per_parameter'"
                )

    def _change_type(self, dtype: torch.dtype) -> None:
        if self._landing is not None and self.has_gradients:  # those of earlier micro-steps
            self._accumulated = self._total(self._landing)
            self._landing.release()
            self._landing = None
        self.compute_dtype = self._policy.computes_in(dtype)
        self.reduce_dtype = self._policy.reduces_in(dtype)
        device = self._data.shard.device
        if self._buffer.dtype != self.compute_dtype:
            self._buffer = FullBuffer(self._full_numel, self.compute_dtype, device)
            self._gathering.forget_tensors()
            self._landing, self._free_landings = None, []
            for parameter in self.parameters:
                parameter.full = None
        if self._scratch is not None and self._scratch.dtype != self.reduce_dtype:
            self._scratch = FullBuffer(self._scratch_numel, self.reduce_dtype, device)
        if self._accumulated is not None:
            self._accumulated = self._accumulated.to(self.reduce_dtype)

    @property
    def is_stale(self) -> bool:
        """A shard has been written to since it was last gathered."""
        return any(map(ShardedParameter.is_stale, self.parameters, self._addresses))

    # -- gathering ---------------------------------------------------------------------------

    @property
    def gathered_numel(self) -> int:
        """Elements of all ranks' parts together."""
        return self._data.shard.size * self.part

    @property
    def is_held(self) -> bool:
        """Whether the gathered parameters have memory."""
        return self._buffer.is_held

    def begin_gather(self, pages: PagePool, origin: Origin) -> bool:
        """Issues the all-gather; nothing is valid before `finish_gather`.

        Returns:
            Whether something about the parameters may have changed since the last one.
        """
        self._gathering.take_back()
        described = self.parameters, self._addresses, repeat(self.storage)
        changed = not all(map(ShardedParameter.is_as_gathered, *described))
        if changed:
            self._prepare()
        for parameter in self.parameters:
            parameter.note_gathered()
        output = self._buffer.hold(pages)
        again = origin.phase in ("backward", "recomputation")
        if again and self._part_kept is not None and self.near is not None:
            self._gathering.issue(self._part_kept, self.near, output, origin)
        elif self._offload is None:
            self.forget_part()
            self._issue_gather(self._travelling_part(), output, origin)
        else:
            with self._offload.copying():
                self.forget_part()
                self._issue_gather(self._travelling_part(), output, origin)
        return changed

    def _prepare(self) -> None:
        """Follows what the modules hold and which parameters train."""
        self.adopt()
        if self.parameters[0].full is None:
            self._make_full()
        self.has_trainable = False
        for parameter in self.parameters:
            trains = parameter.sharded.requires_grad
            if parameter.full.requires_grad != trains:  # type: ignore[union-attr]
                parameter.full.requires_grad_(trains)  # type: ignore[union-attr]
                self._hook_gradient(parameter)
            self.has_trainable |= trains

    def finish_gather(self) -> None:
        """Waits for the all-gather and registers the gathered parameters on the modules."""
        self._gathering.wait()
        self._unpack()
        self.register_full()

    def _unpack(self) -> None:
        """Brings what has been gathered to where the parameters are: it is there."""

    def take_back(self) -> None:
        """As `Gathering.take_back`."""
        self._gathering.take_back()

    def register_full(self) -> None:
        for parameter in self.parameters:
            assert parameter.full is not None
            parallel = parameter.parallel is not None
            parameter.register(parameter.show_parallel() if parallel else parameter.full)

    def register_shards(self) -> None:
        for parameter in self.parameters:
            parameter.register(parameter.sharded)

    def release(self, pages: PagePool) -> None:
        """Registers the shards and leaves the gathered memory to others."""
        self._gathering.take_back()
        self.register_shards()
        self._buffer.release(pages)

    def keep_part(self) -> None:
        """Before a release: keeps what a gather over `near` will put together again."""
        if self.near is None:
            return
        kept = self.gathered_numel // self.near.size
        start = self.near.rank * kept
        part = self._buffer.data[start : start + kept]
        self._part_kept = aligned_empty(kept, part.dtype, part.device).copy_(part)

    def forget_part(self) -> None:
        self._part_kept = None

    def _make_full(self) -> None:
        # Neither inference mode nor no_grad of the caller may mark the leaves for good.
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self.parameters:
                # `.data` gives the view a version counter of its own: gathering again must not
                # look to autograd like a modification of what it has saved.
                parameter.make_full(self._full_view(parameter, self._buffer.data.data))
                self._hook_gradient(parameter)

    @property
    def _full_numel(self) -> int:
        return self.gathered_numel

    def _full_view(self, parameter: ShardedParameter, buffer: Tensor) -> Tensor:
        """The parameter's place in a gathered buffer, in its shape."""
        cut = parameter.cut
        return buffer[cut.offset : cut.offset + cut.numel].view(cut.shape)

    def _travelling_part(self) -> Tensor:
        """This rank's part in the type it travels in: the storage itself wherever it can be."""
        part = self._on_device(self.storage)
        if part.dtype == self.compute_dtype:
            return part
        return aligned_empty(part.numel(), self.compute_dtype, part.device).copy_(part)

    def _on_device(self, part: Tensor) -> Tensor:
        return part if self._offload is None else self._offload.to_device(part)

    def _issue_gather(self, part: Tensor, output: Tensor, origin: Origin) -> None:
        repeats = part is self.storage
        issue = self._gathering.issue_again if repeats else self._gathering.issue
        issue(part, self._data.shard, output, origin)

    # -- gradients ---------------------------------------------------------------------------

    def on_gradient(self, callback: Callable[[ShardedParameter], None]) -> None:
        """Calls `callback` whenever autograd has finished a gradient of a gathered parameter."""
        self._on_gradient = callback

    def _hook_gradient(self, parameter: ShardedParameter) -> None:
        full = parameter.full
        assert full is not None
        if self._on_gradient is None or not full.requires_grad or hasattr(full, _HOOKED):
            return
        # Python's collector does not see what such a hook holds: the bucket would live for ever.
        bucket, place = ref(self), self.parameters.index(parameter)

        def finished(_: Tensor) -> None:
            alive = bucket()
            if alive is not None and alive._on_gradient is not None:
                alive.has_gradients = True
                alive._on_gradient(alive.parameters[place])

        full.register_post_accumulate_grad_hook(finished)
        setattr(full, _HOOKED, True)

    def _chooses_place(self, cut: AnyCut) -> bool:
        """Whether autograd is given the place for gradients, instead of choosing it."""
        even = isinstance(cut, Cut) and cut.is_even
        return not even or self._data.shard.device.type == "cpu"

    def make_room(self, pages: PagePool) -> None:
        """Gives autograd the place into which it accumulates gradients; zero to begin with."""
        if not self._lands or not self.has_trainable:
            return
        landing = self._landing
        if landing is None:
            landing = self._landing = self._new_landing(pages)
        for parameter, place in zip(self.parameters, self._places(landing)):
            full = parameter.full
            assert full is not None
            if full.requires_grad and full.grad is None:
                full.grad = place
                self._given.add(id(full))

    def _places(self, landing: Memory) -> list[Tensor]:
        """Every parameter's place in `landing`, in its shape; made once."""
        places = self._known_places.get(landing)
        if places is None:
            places = [self._full_view(p, landing.data) for p in self.parameters]
            self._known_places[landing] = places
        return places

    def _new_landing(self, pages: PagePool) -> Memory:
        if not self._free_landings:
            device = self._data.shard.device
            self._free_landings.append(FullBuffer(self.gathered_numel, self.compute_dtype, device))
        landing = self._free_landings.pop()
        landing.hold(pages).zero_()
        return landing

    def _collect(self, pages: PagePool) -> Memory | Tensor | None:
        """Takes autograd's gradients from the parameters: all in one buffer, or where one lies."""
        found = []
        for index, parameter in enumerate(self.parameters):
            full = parameter.full
            if full is not None and full.grad is not None:
                found.append((index, full.grad, id(full) in self._given))
                full.grad = None
        self._given.clear()
        self.has_gradients = False
        landing, self._landing = self._landing, None
        if landing is None and not (self._lands and found):
            return found[0][1].resolve_conj().resolve_neg().contiguous().view(-1) if found else None
        if landing is None:
            landing = self._new_landing(pages)
        places = self._places(landing)
        for index, gradient, is_given in found:
            place = places[index]
            is_there = gradient is place or gradient.data_ptr() == place.data_ptr()
            if not is_there and gradient.numel():
                # It is the sum, by create_graph; or the unit's outputs did not lead here.
                place.copy_(gradient) if is_given else place.add_(gradient)
        return landing

    def accumulate(self, pages: PagePool) -> None:
        """Keeps this backward's gradients, unreduced, in the type of the reduction."""
        if not self.has_gradients:
            self.drop_room(pages)
            return
        kept = self._collect(pages)
        self.has_gradients = True
        if self._accumulated is None and self.reduce_dtype == self.compute_dtype:
            if isinstance(kept, Memory):
                self._landing = kept
            else:
                self._accumulated = kept
            return
        self._accumulated = self._total(kept)
        self._give_back(kept, pages)

    def drop_room(self, pages: PagePool) -> None:
        """Frees the place for gradients if autograd has put none there."""
        if self.has_gradients or self._landing is None:
            return
        self._give_back(self._collect(pages), pages)

    def forget(self, pages: PagePool) -> None:
        """Drops gradients, those of earlier micro-steps included."""
        self._give_back(self._collect(pages), pages)
        self._accumulated = None

    def _total(self, found: Memory | Tensor | None) -> Tensor:
        """Everything accumulated so far, flat and aligned, in the type of the reduction."""
        gradients = found.data if isinstance(found, Memory) else found
        total = self._accumulated
        if total is None:
            total = aligned_empty(self._full_numel, self.reduce_dtype, self._data.shard.device)
            return total.zero_() if gradients is None else total.copy_(gradients)
        return total if gradients is None else total.add_(gradients)

    def _give_back(self, found: Memory | Tensor | None, pages: PagePool) -> None:
        if isinstance(found, Memory):
            found.release(pages)
            self._recycle(found)

    def _recycle(self, landing: Memory) -> None:
        # After a change of type old ones are of no use.
        if landing.dtype == self.compute_dtype and not self._free_landings:
            self._free_landings.append(landing)

    def scatter(self, output: Tensor, pages: PagePool, divisor: float, origin: Origin) -> Scatter:
        """Issues the reduce-scatter of the gradients, earlier micro-steps' included.

        Parameters that backward did not use count as zero.

        Args:
            output: `[part]`, in the type of the reduction.
            divisor: what the sum is divided by; 1 unless the bucket `divides`.
        """
        found = self._collect(pages)
        converts = self._accumulated is not None or self.reduce_dtype != self.compute_dtype
        if converts or found is None:
            sent = self._total(found)
            self._accumulated = None
            self._give_back(found, pages)
            found = None
        else:
            sent = found.data if isinstance(found, Memory) else found
        scratch = self._hold_scratch(pages)
        gradients = found if isinstance(found, Memory) else None
        place = None if scratch is None else scratch.data
        packed = self._packed(sent)
        if gradients is not None and packed is sent and scratch is self._scratch:
            handle = self._scatter_of(gradients, place)(output, origin)
        else:
            handle = reduce_scatter(
                packed, self._data.shard, output=output, scratch=place, lends=True, origin=origin
            )
        return Scatter(handle, gradients, scratch, self._recycle)

    def _scatter_of(self, gradients: Memory, scratch: Tensor | None) -> _Scattering:
        """The reduce-scatter out of a place for gradients: the same at every step, checked once."""
        known = self._known_scatters.get(gradients)
        if known is None or known[0] is not scratch:
            again = repeatable_reduce_scatter(
                gradients.data, self._data.shard, scratch=scratch, lends=True
            )
            known = self._known_scatters[gradients] = (scratch, again)
        return known[1]

    def _packed(self, gradients: Tensor) -> Tensor:
        """The gradients as the reduce-scatter takes them."""
        return gradients

    @property
    def _scratch_numel(self) -> int:
        """Elements of others' gradients that are received before they are added."""
        return self.gathered_numel - self.part

    def _hold_scratch(self, pages: PagePool) -> Memory | None:
        """Memory to receive others' gradients in, where backends need it."""
        if self._scratch is None or self._scratch.is_held:
            return None
        self._scratch.hold(pages)
        return self._scratch

    def local_gradient(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        """The parameter's gradient inside this rank's reduced part: a view."""
        return self._shard_view(parameter, part)


_HOOKED = "_hp_fsdp_hooked"
